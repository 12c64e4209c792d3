/** Whom the page serves: page.json beside it, and the token of the link that a person was sent. */

/** What page.json says, with complete addresses. */
export interface PageSettings {
  readonly coordinator: string;
  /** Where the round's public counts are, or null: nobody publishes them. */
  readonly status: string | null;
  readonly title: string;
  /** What is trained, in plain words. */
  readonly about: string;
  readonly task: "digits";
}

/** page.json is missing, or is not one. */
export class PageError extends Error {
  override name = "PageError";
}

const TOKEN = /^[A-Za-z0-9_-]{43,128}$/;

/** Return the token of an address's fragment, `#token=...`; null where it has none. */
export function tokenOf(hash: string): string | null {
  return new URLSearchParams(hash.replace(/^#/, "")).get("token") || null;
}

/** Return the token in what a person typed or pasted: the token itself, or the whole link. */
export function typedToken(text: string): string {
  const place = text.indexOf("#");
  return (place < 0 ? null : tokenOf(text.slice(place))) ?? text.trim();
}

/** Return what is wrong with a token, in words; null where it can be one. */
export function tokenProblem(token: string): string | null {
  if (token === "" || TOKEN.test(token)) return null;
  return "This is not a whole token. Copy it again, or paste the whole link that you were sent.";
}

/** Read page.json. `base` is the page's own address. Throws PageError. */
export function readPageSettings(found: unknown, base: string): PageSettings {
  const { coordinator, status = null, title, about, task } = (found ?? {}) as Record<string, unknown>;
  if (task !== "digits") throw new PageError(`page.json names the task ${JSON.stringify(task)}; this page has digits`);
  if (typeof coordinator !== "string") throw new PageError("page.json names no coordinator");
  if (status !== null && typeof status !== "string") throw new PageError("page.json names no address as its status");
  return {
    coordinator: coordinatorUrl(coordinator, base),
    status: status === null ? null : new URL(status, base).href,
    title: typeof title === "string" && title !== "" ? title : "Train together",
    about: typeof about === "string" ? about : "",
    task,
  };
}

/** Return the coordinator's address: as given, or for `:PORT` on the host of the page. Throws PageError. */
function coordinatorUrl(given: string, base: string): string {
  const { protocol, hostname } = new URL(base);
  const text = given.startsWith(":") ? `${protocol === "https:" ? "wss" : "ws"}://${hostname}${given}` : given;
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    throw new PageError(`page.json names the coordinator ${given}; expected wss://HOST:PORT or :PORT`);
  }
  if (url.protocol !== "ws:" && url.protocol !== "wss:") {
    throw new PageError(`page.json names the coordinator ${given}; expected wss://HOST:PORT or :PORT`);
  }
  return url.href;
}
