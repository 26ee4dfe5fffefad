// As much of a browser as the scripts of a report touch: a page made from its elements, and a clock that is set by hand.
"use strict";

class Element {
  constructor([tag, attributes, children], parent) {
    this.tag = tag;
    this.attributes = attributes;
    this.parent = parent;
    this.text = "";
    this.style = {};
    this.dataset = {};
    this.listeners = {};
    this.className = attributes.class ?? "";
    this.hidden = "hidden" in attributes;
    this.open = "open" in attributes;
    this.children = children.map((child) => new Element(child, this));
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("data-")) this.dataset[name.slice(5)] = value;
      if (["name", "value", "min", "max"].includes(name)) this[name] = value;
    }
    if (tag === "select") {
      this.selectedIndex = Math.max(0, this.children.findIndex((option) => "selected" in option.attributes));
      this.value = this.children[this.selectedIndex].attributes.value;
    }
    this.classList = {
      add: (name) => this.classList.toggle(name, true),
      toggle: (name, on) => {
        const names = this.className.split(" ").filter((each) => each && each !== name);
        this.className = (on ? [...names, name] : names).join(" ");
      },
    };
  }

  get textContent() { return this.text; }

  set textContent(text) { this.text = String(text); }

  setAttribute(name, value) { this.attributes[name] = String(value); }

  addEventListener(name, listener) { this.listeners[name] = listener; }

  fire(name) { this.listeners[name](); }

  *all() {
    for (const child of this.children) {
      yield child;
      yield* child.all();
    }
  }

  is(simple) { // such as: span, .race-text, #whatif-depth, output[for="a"]
    const [, tag, rest] = simple.match(/^([\w]*)(.*)$/);
    const classes = this.className.split(" ");
    const parts = [...rest.matchAll(/\.([\w-]+)|#([\w-]+)|\[([\w-]+)(?:="([^"]*)")?\]/g)];
    return (!tag || this.tag === tag) && parts.every(([, name, id, attribute, value]) => {
      if (name) return classes.includes(name);
      if (id) return this.attributes.id === id;
      return attribute in this.attributes && (value === undefined || this.attributes[attribute] === value);
    });
  }

  matches(selector) { // parts with spaces between them; > is taken for a space
    const parts = selector.split(/[ >]+/);
    if (!this.is(parts.pop())) return false;
    for (let above = this.parent; parts.length && above; above = above.parent) {
      if (above.is(parts.at(-1))) parts.pop();
    }
    return !parts.length;
  }

  querySelectorAll(selector) { return [...this.all()].filter((element) => element.matches(selector)); }

  querySelector(selector) { return this.querySelectorAll(selector)[0] ?? null; }
}

// Standard input: {"page": elements, "script": of the page, "test": a function body}. The test gets the page, which is
// `document`, and `pass`, which lets milliseconds go by, a frame each 16; what it returns is printed as JSON.
const { page, script, test } = JSON.parse(require("fs").readFileSync(0));
const document = new Element(page, null);
let now = 0, frames = [];
Object.defineProperty(globalThis, "performance", { value: { now: () => now } });
globalThis.document = document;
globalThis.window = {};
globalThis.matchMedia = () => ({ matches: true });
globalThis.requestAnimationFrame = (frame) => frames.push(frame);

function pass(ms) {
  for (const end = now + ms; now < end;) {
    now = Math.min(end, now + 16);
    const due = frames;
    frames = [];
    for (const frame of due) frame(now);
  }
}

new Function(script)();
console.log(JSON.stringify(new Function("document", "pass", test)(document, pass)));
