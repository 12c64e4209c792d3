/** Whom the page serves: page.json beside it, and the token of the link that a person was sent. */

import { readToken } from "../../src/storage/identity.ts";

/** What page.json says, with complete addresses. */
export interface PageSettings {
  readonly coordinator: string;
  /** Where the round's public counts are, or null: nobody publishes them. */
  readonly status: string | null;
  readonly title: string;
  /** What is trained, in plain words. */
  readonly about: string;
  readonly task: "digits";
  /** Whether a device needs an invitation; null: page.json does not say. */
  readonly invites: boolean | null;
  /** From which pages the coordinator takes devices; null: page.json does not say. */
  readonly pages: {
    /** Origins that its operator named. */
    readonly origins: readonly string[];
    /** The port of the page that it serves itself. */
    readonly port: number;
  } | null;
}

/** What of `location` is needed to know whether the coordinator takes the page. */
export type Place = Pick<Location, "origin" | "protocol" | "hostname" | "port">;

/** page.json is missing, or is not one. */
export class PageError extends Error {
  override name = "PageError";
}

/** Return the token of an address's fragment, `#token=...`; null where it has none. */
export function tokenOf(hash: string): string | null {
  return new URLSearchParams(hash.replace(/^#/, "")).get("token") || null;
}

/** Return the token that the link brought: it is in the fragment, or, after a reload, in the tab's history entry. */
export function linkedToken(hash: string, entry: unknown): string | null {
  const { invitation } = (entry ?? {}) as { invitation?: unknown };
  return tokenOf(hash) ?? (typeof invitation === "string" ? invitation : null);
}

/** Return the token in what a person typed or pasted: the token itself, or the whole link. */
export function typedToken(text: string): string {
  const hash = text.indexOf("#");
  return (hash < 0 ? null : tokenOf(text.slice(hash))) ?? text.trim();
}

/** Return what is wrong with a token, in words; null where it can be one, or there is none. */
export function tokenProblem(token: string): string | null {
  if (token === "" || isToken(token)) return null;
  return "This is not a whole token. Copy it again, or paste the whole link that you were sent.";
}

/** Return what the form begins with: the token, whether the field for it is shown, and what is wrong with it. A token that
 * can be one needs no look; a broken one is shown, because what is in the field is what counts. */
export function invitationField(invited: string | null): { token: string; shown: boolean; problem: string | null } {
  if (invited === null) return { token: "", shown: true, problem: null };
  if (isToken(invited)) return { token: invited, shown: false, problem: null };
  const problem =
    "The link that you opened is cut off: its token is not whole. Open the link again from where you got it, or paste all " +
    "of it here.";
  return { token: invited, shown: true, problem };
}

export function isToken(text: string): boolean {
  try {
    readToken(text);
    return true;
  } catch {
    return false;
  }
}

/** Return whether the coordinator takes devices from this page; null where page.json does not say. The rule is the
 * coordinator's own (docs/operate/page.md, "Whose page may connect"). */
export function takesPage({ pages, coordinator }: PageSettings, place: Place): boolean | null {
  if (pages === null) return null;
  if (pages.origins.includes(place.origin)) return true;
  const { hostname, protocol } = new URL(coordinator);
  const secure = protocol === "wss:";
  const port = Number(place.port || (secure ? 443 : 80));
  const own = hostname === place.hostname && port === pages.port && secure === (place.protocol === "https:");
  return own && (secure || isAddress(hostname));
}

/** Return whether a host is this machine or an address: a name may have been pointed at somebody else's address. */
function isAddress(hostname: string): boolean {
  return hostname === "localhost" || hostname.startsWith("[") || /^[0-9]+(\.[0-9]+){3}$/.test(hostname);
}

/** Read page.json. `base` is the page's own address. Throws PageError. */
export function readPageSettings(found: unknown, base: string): PageSettings {
  const { coordinator, status = null, title, about, task, invites, pages } = (found ?? {}) as Record<string, unknown>;
  if (task !== "digits") throw new PageError(`page.json names the task ${JSON.stringify(task)}; this page has digits`);
  if (typeof coordinator !== "string") throw new PageError("page.json names no coordinator");
  if (status !== null && typeof status !== "string") throw new PageError("page.json names no address as its status");
  return {
    coordinator: coordinatorUrl(coordinator, base),
    status: status === null ? null : new URL(status, base).href,
    title: typeof title === "string" && title !== "" ? title : "Train together",
    about: typeof about === "string" ? about : "",
    task,
    invites: typeof invites === "boolean" ? invites : null,
    pages: readPages(pages),
  };
}

function readPages(found: unknown): PageSettings["pages"] {
  const { origins, port } = (found ?? {}) as Record<string, unknown>;
  if (!Array.isArray(origins) || typeof port !== "number") return null;
  return { origins: origins.filter((origin) => typeof origin === "string"), port };
}

/** Ask for page.json until it is there. wait: is told why it is not, and how often it was asked for; resolves when it is
 * time to ask again. */
export async function settingsWhenThere(
  ask: () => Promise<PageSettings>,
  wait: (error: Error, asked: number) => Promise<void>,
): Promise<PageSettings> {
  for (let asked = 1; ; asked++) {
    try {
      return await ask();
    } catch (error) {
      await wait(error as Error, asked);
    }
  }
}

/** Return the coordinator's address: as given, or for `:PORT` on the host of the page. Throws PageError. */
function coordinatorUrl(given: string, base: string): string {
  const { protocol, hostname } = new URL(base);
  const wanted = "expected wss://HOST:PORT or :PORT";
  const text = given.startsWith(":") ? `${protocol === "https:" ? "wss" : "ws"}://${hostname}${given}` : given;
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    throw new PageError(`page.json names the coordinator ${given}; ${wanted}`);
  }
  if (url.protocol !== "ws:" && url.protocol !== "wss:") {
    throw new PageError(`page.json names the coordinator ${given}; ${wanted}`);
  }
  const local = ["localhost", "127.0.0.1", "[::1]"].includes(url.hostname);
  if (protocol === "https:" && url.protocol === "ws:" && !local) {
    throw new PageError(
      `page.json names the coordinator ${given}; a page that came over https may connect to wss:// alone`,
    );
  }
  return url.href;
}
