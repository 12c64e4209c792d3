/**
 * Keeps a copy of the page on the device, so that it opens and one can draw without a network.
 *
 * The copy is of one version, as a whole: VERSION is a hash of all its files. A newer version waits until the person
 * takes it, or until all tabs of this one are closed. page.json is asked for first, and its copy, which all versions
 * share, stands in when nobody answers; status.json is never copied.
 */

export {}; // a module: its names are its own

/** Put in by the build. */
declare const VERSION: string;
declare const SHELL: readonly string[];
/** Files that are copied when they are first used. */
declare const LATER: readonly string[];

interface WaitingEvent extends Event {
  waitUntil(done: Promise<unknown>): void;
}
interface FetchedEvent extends WaitingEvent {
  readonly request: Request;
  respondWith(answer: Promise<Response>): void;
}
interface Scope {
  readonly registration: { readonly scope: string };
  readonly clients: { claim(): Promise<void> };
  skipWaiting(): Promise<void>;
  addEventListener(name: "install" | "activate", listener: (event: WaitingEvent) => void): void;
  addEventListener(name: "fetch", listener: (event: FetchedEvent) => void): void;
  addEventListener(name: "message", listener: (event: MessageEvent) => void): void;
}
const worker = globalThis as unknown as Scope;
/** Pages of other folders of the same host have their own copies. */
const PREFIX = `fleetlearn-page ${worker.registration.scope} `;
const NAME = PREFIX + VERSION;
/** Has page.json. */
const SETTINGS = `${PREFIX}settings`;
/** Milliseconds after which the copy of page.json does: some networks neither answer nor fail. */
const PATIENCE = 5000;

worker.addEventListener("install", (event) => {
  const copied = async (): Promise<void> => {
    const cache = await caches.open(NAME);
    await cache.addAll(SHELL.map((path) => new Request(path, { cache: "no-cache" })));
    // The page has asked for it before this worker was there to copy it.
    const asked = new Request("page.json", { cache: "no-cache" });
    await newest(asked).catch(() => {}); // the next visit asks again
  };
  event.waitUntil(copied());
});

worker.addEventListener("activate", (event) => {
  const cleaned = async (): Promise<void> => {
    const names = await caches.keys();
    const old = names.filter((name) => name.startsWith(PREFIX) && name !== NAME && name !== SETTINGS);
    await Promise.all(old.map((name) => caches.delete(name)));
    await worker.clients.claim();
  };
  event.waitUntil(cleaned());
});

worker.addEventListener("message", ({ data }) => {
  if (data === "take over") void worker.skipWaiting();
});

worker.addEventListener("fetch", (event) => {
  const { request } = event;
  const scope = worker.registration.scope;
  if (request.method !== "GET" || !request.url.startsWith(scope)) return;
  const path = request.url.slice(scope.length).replace(/[?#].*$/, "");
  if (path === "page.json") event.respondWith(newest(request));
  else if (path === "" || path === "index.html") event.respondWith(copy("./", request));
  else if (SHELL.includes(path) || LATER.includes(path)) event.respondWith(copy(path, request));
});

/** Return the copy; what has none, such as the runtime at its first use, is fetched and copied. */
async function copy(path: string, request: Request): Promise<Response> {
  const cache = await caches.open(NAME);
  const stored = await cache.match(path);
  if (stored !== undefined) return stored;
  const answer = await fetch(request);
  if (answer.ok) await cache.put(path, answer.clone());
  return answer;
}

/** Return what the network has, or the last copy of it. A network that asks for a login answers with its own page,
 * and a host that is being mended with an error: neither takes the copy's place. */
async function newest(request: Request): Promise<Response> {
  const cache = await caches.open(SETTINGS);
  const stored = await cache.match(request.url);
  let answer: Response;
  try {
    answer = await fetch(request, { signal: AbortSignal.timeout(PATIENCE) });
  } catch (error) {
    if (stored !== undefined) return stored;
    throw error;
  }
  const good = answer.ok && (answer.headers.get("Content-Type") ?? "").includes("json");
  if (good) await cache.put(request.url, answer.clone());
  return good ? answer : (stored ?? answer);
}
