/** The page's elements, and new ones. */

/** Return the element with this id, which index.html has. */
export function the<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no element with the id ${id}`);
  return found as T;
}

/** Make an element with these attributes and children. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Readonly<Record<string, string>> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function makeSvg(
  tag: string,
  attributes: Readonly<Record<string, string | number>> = {},
  ...children: (Node | string)[]
): SVGElement {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** Write a text where it differs: a screen reader reads a live region again at each change. */
export function write(id: string, text: string): void {
  const element = the(id);
  if (element.textContent !== text) element.textContent = text;
}

/** Say something to people who hear the page; what they see says it too. */
export function announce(text: string): void {
  write("announcer", text);
}
