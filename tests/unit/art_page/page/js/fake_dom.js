// A document of a few methods, enough for the page's parts to build their elements in node. What is built can be read as a tree.

export class Node {
  constructor() {
    this.parent = null;
  }
}

export class Text extends Node {
  constructor(data) {
    super();
    this.data = data;
  }
}

export class Element extends Node {
  constructor(tag) {
    super();
    this.tag = tag;
    this.children = [];
    this.attributes = {};
    this.properties = {};
    this.style = { setProperty: (name, value) => (this.properties[name] = value) };
    this.classList = { add: () => {}, toggle: () => {} };
  }

  append(...children) {
    this.children.push(...children.map((child) => (child instanceof Node ? child : new Text(String(child)))));
  }

  setAttribute(name, value) {
    this.attributes[name] = value;
  }

  addEventListener() {}

  remove() {}

  set textContent(text) {
    this.children = text === "" ? [] : [new Text(text)];
  }

  get textContent() {
    return this.children.map((child) => (child instanceof Text ? child.data : child.textContent)).join("");
  }
}

/** Puts the fake document in place of the browser's. */
export function useFakeDom() {
  const document = { createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag) };
  Object.assign(globalThis, { Node, document, HTMLElement: Element });
}

/** Every element below and with `root`. */
export function elementsOf(root) {
  return root instanceof Element ? [root, ...root.children.flatMap(elementsOf)] : [];
}

/** Every text that the page would show or speak: text nodes, attributes, and properties such as `value`. */
export function shownTexts(root) {
  return elementsOf(root).flatMap((element) => [
    ...element.children.filter((child) => child instanceof Text).map((child) => child.data),
    ...Object.values(element.attributes).map(String),
  ]);
}
