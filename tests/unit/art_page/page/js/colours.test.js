// Colours of data: seen on both backgrounds, told apart by eyes without red or green cones.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import * as colours from "../static/lib/colours.js";

// Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
const EYES = {
  usual: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protanopia: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deuteranopia: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
};

const linear = (hex) => [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16) / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));

function lab(hex, eye) {
  const seen = EYES[eye].map((row) => Math.min(1, Math.max(0, row.reduce((sum, weight, at) => sum + weight * linear(hex)[at], 0))));
  const toXyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]];
  const white = [0.95047, 1, 1.08883];
  const [x, y, z] = toXyz.map((row, at) => row.reduce((sum, weight, part) => sum + weight * seen[part], 0) / white[at]).map((value) => (value > 0.008856 ? Math.cbrt(value) : 7.787 * value + 16 / 116));
  return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
}

const distance = (one, other, eye) => Math.hypot(...lab(one, eye).map((value, at) => value - lab(other, eye)[at]));
const contrast = (one, other) => {
  const [dark, light] = [colours.luminance(one), colours.luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
};

function themes() {
  const css = readFileSync(new URL("../static/styles/base.css", import.meta.url), "utf8");
  const values = (block) => Object.fromEntries([...block.matchAll(/--([a-z-]+): (#[0-9a-f]{6})/g)].map((match) => [match[1], match[2]]));
  const auto = values(css.slice(css.indexOf("prefers-color-scheme: dark"), css.indexOf(':root[data-theme="dark"]')));
  const chosen = values(css.slice(css.indexOf(':root[data-theme="dark"]'), css.indexOf(':root[data-theme="light"]')));
  assert.deepEqual(auto, chosen);
  return { light: values(css.slice(0, css.indexOf("@media"))), dark: chosen };
}

test("lines of charts differ for all eyes", () => {
  for (const eye of Object.keys(EYES)) {
    for (const [at, one] of colours.CATEGORIES.entries()) {
      for (const other of colours.CATEGORIES.slice(at + 1)) assert.ok(distance(one, other, eye) > 25, `${one} ${other} ${eye}: ${distance(one, other, eye)}`);
    }
  }
});

test("lines contrast 3:1 with the paper of both themes", () => {
  for (const theme of Object.values(themes())) for (const line of colours.CATEGORIES) assert.ok(contrast(line, theme.paper) >= 3, `${line} on ${theme.paper}`);
});

test("text contrasts 4.5:1 with what it stands on, controls 3:1 (WCAG AA)", () => {
  for (const [name, theme] of Object.entries(themes())) {
    for (const text of ["text", "soft", "accent", "good", "bad", "note"]) {
      for (const ground of ["paper", "raised"]) assert.ok(contrast(theme[text], theme[ground]) >= 4.5, `${name}: ${text} on ${ground} ${contrast(theme[text], theme[ground])}`);
    }
    for (const ground of ["accent-soft", "note-soft", "bad-soft", "mark"]) assert.ok(contrast(theme.text, theme[ground]) >= 4.5, `${name}: text on ${ground}`);
    assert.ok(contrast(theme.accent, theme["accent-soft"]) >= 4.5, `${name}: accent on accent-soft`);
    assert.ok(contrast(theme["line-strong"], theme.paper) >= 3, `${name}: borders of controls`);
  }
});

test("text on any colour of a scale contrasts 4.5:1", () => {
  for (let share = 0; share <= 1; share += 0.01) {
    for (const ground of [colours.sequential(share), colours.diverging(2 * share - 1)]) assert.ok(contrast(ground, colours.textOn(ground)) >= 4.5, ground);
  }
});

test("the sequential scale only gets darker, for all eyes", () => {
  for (const eye of Object.keys(EYES)) {
    let before = Infinity;
    for (let share = 0; share <= 1.0001; share += 0.05) {
      const [lightness] = lab(colours.sequential(share), eye);
      assert.ok(lightness < before, `${eye} at ${share}`);
      before = lightness;
    }
  }
});

test("the diverging scale is white in the middle and its ends differ for all eyes", () => {
  assert.equal(colours.diverging(0), "#ffffff");
  for (const eye of Object.keys(EYES)) for (const size of [0.5, 1]) assert.ok(distance(colours.diverging(size), colours.diverging(-size), eye) > 25, eye);
});

test("values that are not known get a colour of their own", () => {
  const unknown = colours.sequential(null);
  assert.equal(colours.diverging(NaN), unknown);
  assert.match(unknown, /^#[0-9a-f]{6}$/);
});
