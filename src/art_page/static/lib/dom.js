/**
 * Makes elements. Strings always become text nodes, so that what a trajectory says is never read as HTML, and their hidden
 * characters become marks, so that no text can turn its neighbours around.
 *
 * @typedef {Node | string | number | null | undefined | false | Child[]} Child  what an element can hold; null, undefined and false are left out
 * @typedef {Record<string, any>} Props
 *   `class`, `data-*`, `aria-*` and other attributes; true sets an empty attribute, false and null leave it out.
 *   `on:NAME` is a listener. `style` is an object of CSS properties, set through CSSOM. `value` and `checked` are set as properties.
 *   `href` must begin with "#", or be a path on this server together with `download`.
 */
import { visibleText } from "./visible_text.js";

const SVG = "http://www.w3.org/2000/svg";
/** Attributes that a person reads or hears. */
const SAID = /^(title|placeholder|aria-)/;

/**
 * Make an HTML element.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Props | null} [props]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  setProps(element, props);
  addChildren(element, children);
  return element;
}

/**
 * Make an SVG element.
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Props | null} [props]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function svg(tag, props, ...children) {
  const element = document.createElementNS(SVG, tag);
  setProps(element, props);
  addChildren(element, children);
  return element;
}

/**
 * Replace everything inside an element.
 * @param {Element} element
 * @param {...Child} children
 */
export function replace(element, ...children) {
  element.textContent = "";
  addChildren(element, children);
}

/**
 * @param {Element} element
 * @param {Child[]} children
 */
function addChildren(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) addChildren(element, child);
    else element.append(child instanceof Node ? child : visibleText(String(child)));
  }
}

/**
 * @param {HTMLElement | SVGElement} element
 * @param {Props | null | undefined} props
 */
function setProps(element, props) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on:")) element.addEventListener(name.slice(3), value);
    else if (name === "style") setStyle(element, value);
    else if (name === "value" || name === "checked") Object.assign(element, { [name]: value });
    else if (/href$/i.test(name) && !isSafeLink(String(value), props?.download !== undefined)) throw new Error(`a link must begin with #, got ${value}`);
    else if (/^(on|src|action|formaction)/i.test(name)) throw new Error(`the attribute ${name} is not allowed; listeners are on:NAME`);
    else if (SAID.test(name)) element.setAttribute(name, visibleText(String(value)));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

/**
 * @param {HTMLElement | SVGElement} element
 * @param {Record<string, string | number | null>} style
 */
export function setStyle(element, style) {
  for (const [name, value] of Object.entries(style)) element.style.setProperty(name, value === null ? "" : String(value));
}

/**
 * @param {string} href
 * @param {boolean} isDownload
 */
function isSafeLink(href, isDownload) {
  return href.startsWith("#") || (isDownload && new URL(href, document.baseURI).origin === location.origin && /^https?:$/.test(new URL(href, document.baseURI).protocol));
}
