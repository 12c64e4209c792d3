/** The page's service worker, with a cache and a network that the test plays. */

import { afterEach, beforeEach, expect, test, vi } from "vitest";

const SCOPE = "https://page.example/digits/";
const PAGE_JSON = `${SCOPE}page.json`;

type Listener = (event: object) => void;
let listeners: Map<string, Listener>;
let kept: Map<string, Map<string, Response>>;
/** What the network answers to each address; undefined: nobody answers. */
let network: (address: string) => Response | undefined;

const addressOf = (request: Request | string): string =>
  typeof request === "string" ? new URL(request, SCOPE).href : request.url;

function cacheOf(name: string): object {
  const entries = kept.get(name) ?? new Map<string, Response>();
  kept.set(name, entries);
  return {
    addAll: async (requests: Request[]) => {
      for (const { url } of requests) entries.set(url, await fetchNow(url));
    },
    match: async (request: Request | string) => entries.get(addressOf(request))?.clone(),
    put: async (request: Request | string, answer: Response) => {
      entries.set(addressOf(request), answer);
    },
  };
}

async function fetchNow(request: Request | string): Promise<Response> {
  const answer = network(addressOf(request));
  if (answer === undefined) throw new TypeError("Failed to fetch");
  return answer;
}

function settings(title: string): Response {
  return new Response(JSON.stringify({ title }), { headers: { "Content-Type": "application/json" } });
}

beforeEach(async () => {
  listeners = new Map();
  kept = new Map();
  network = (address) => (address === PAGE_JSON ? settings("first") : new Response("a file"));
  vi.stubGlobal("VERSION", "1");
  vi.stubGlobal("SHELL", ["./", "page.js"]);
  vi.stubGlobal("LATER", ["big.wasm"]);
  vi.stubGlobal("registration", { scope: SCOPE });
  vi.stubGlobal("clients", { claim: async () => {} });
  vi.stubGlobal("addEventListener", (name: string, listener: Listener) => listeners.set(name, listener));
  vi.stubGlobal("fetch", fetchNow);
  // Node's takes whole addresses alone.
  vi.stubGlobal(
    "Request",
    class {
      readonly url: string;
      readonly method = "GET";
      constructor(path: string) {
        this.url = new URL(path, SCOPE).href;
      }
    },
  );
  vi.stubGlobal("caches", {
    open: async (name: string) => cacheOf(name),
    keys: async () => [...kept.keys()],
    delete: async (name: string) => kept.delete(name),
  });
  await start();
});
afterEach(() => vi.unstubAllGlobals());

/** Run the worker's script, as a browser does for each version. */
async function start(): Promise<void> {
  vi.resetModules();
  await import("../shell/service_worker.ts");
  for (const name of ["install", "activate"]) {
    let done: Promise<unknown> = Promise.resolve();
    listeners.get(name)!({ waitUntil: (promise: Promise<unknown>) => (done = promise) });
    await done;
  }
}

async function ask(path: string): Promise<Response | null> {
  let answer: Promise<Response> | null = null;
  listeners.get("fetch")!({
    request: new Request(path),
    respondWith: (promise: Promise<Response>) => {
      answer = promise;
    },
  });
  return answer;
}

async function title(): Promise<string> {
  return (await (await ask("page.json"))!.json()).title;
}

test("after the first visit the page opens without a network: page.json is kept too", async () => {
  network = () => undefined;
  expect(await title()).toBe("first");
  expect(await (await ask("page.js"))!.text()).toBe("a file");
});

test("page.json of the network goes first", async () => {
  network = () => settings("second");
  expect(await title()).toBe("second");
  network = () => undefined;
  expect(await title()).toBe("second");
});

test.each([
  ["a host that is being mended", () => new Response("", { status: 503 })],
  ["a network's own login page", () => new Response("<p>log in", { headers: { "Content-Type": "text/html" } })],
])("%s does not take the place of page.json", async (_, answer) => {
  network = answer;
  expect(await title()).toBe("first");
  network = () => undefined;
  expect(await title()).toBe("first");
});

test("a new version keeps page.json, where the network has none at that moment", async () => {
  vi.stubGlobal("VERSION", "2");
  network = (address) => (address === PAGE_JSON ? undefined : new Response("a newer file"));
  await start();
  network = () => undefined;
  expect(await title()).toBe("first");
  expect(await (await ask("page.js"))!.text()).toBe("a newer file");
  expect([...kept.keys()].filter((name) => name.endsWith(" 1"))).toEqual([]);
});

test("status.json is left to the network", async () => {
  expect(await ask("status.json")).toBeNull();
});
