// What the coordinator says: the session, requests, and the stream of what changes.

const session = { name: null };
const topics = new Map();
let source = null;
let wanted = [];
let listener = () => {};
let stateListener = () => {};
let offset = null;
let lastNews = 0;

export function who() {
  return session;
}

export function mayOperate() {
  return session.role === "operate";
}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

// Ask the coordinator. Throws Refused with its words, also where it cannot be reached.
export async function ask(path, body) {
  const options = { headers: {}, cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
    if (session.csrf) options.headers["X-CSRF-Token"] = session.csrf;
  }
  let answer;
  let content;
  try {
    answer = await fetch(path, options);
    content = await answer.json();
  } catch {
    throw new Refused(0, "the coordinator does not answer");
  }
  if (!answer.ok) throw new Refused(answer.status, content.error ?? answer.statusText);
  return content;
}

function begin(found) {
  for (const key of Object.keys(session)) delete session[key];
  Object.assign(session, found);
  return session.name !== null;
}

export async function resume() {
  return begin(await ask("v1/session"));
}

export async function signIn(token) {
  return begin(await ask("v1/session", { token }));
}

export async function signOut() {
  stop();
  begin(await ask("v1/session/end", {}));
}

// The coordinator's time, in seconds.
export function now() {
  return Date.now() / 1000 - (offset ?? 0);
}

export function topic(name) {
  return topics.get(name);
}

// Call `update` after each change of the topics, and `state` with how the connection is.
export function look(names, update, state) {
  stop();
  wanted = names;
  listener = update;
  stateListener = state;
  topics.clear();
  open();
}

export function stop() {
  source?.close();
  source = null;
}

function open() {
  const own = new EventSource(`v1/live?topics=${wanted.map(encodeURIComponent).join(",")}`);
  source = own;
  own.onopen = () => stateListener("live");
  own.onmessage = (event) => {
    lastNews = Date.now();
    take(JSON.parse(event.data));
    listener();
  };
  own.onerror = () => {
    stateListener("lost");
    if (own.readyState !== EventSource.CLOSED) return; // it tries again by itself
    setTimeout(async () => {
      if (source !== own) return;
      try {
        if (!(await resume())) {
          stateListener("out");
          return;
        }
        await refusal();
      } catch {
        // down: try again
      }
      if (source === own) open();
    }, 1000);
  };
}

// Find out which topic is refused: EventSource does not tell why it has nothing. Such a topic counts
// as ended; it may be there at the next try.
async function refusal() {
  for (const name of wanted) {
    const stop = new AbortController();
    const answer = await fetch(`v1/live?topics=${encodeURIComponent(name)}`, { signal: stop.signal });
    stop.abort();
    if (answer.status === 404) {
      topics.set(name, { ended: true, values: {}, lists: {}, most: {} });
      stateListener("gone");
      listener();
    }
  }
}

export function sinceNews() {
  return (Date.now() - lastNews) / 1000;
}

function take(message) {
  const name = message.topic;
  if (message.ended) {
    topics.set(name, { ended: true, values: {}, lists: {}, most: {} });
    return;
  }
  if (message.values) {
    topics.set(name, { values: message.values, lists: message.lists, most: message.most });
  } else {
    const found = topics.get(name);
    if (!found) return;
    Object.assign(found.values, message.set);
    for (const key of message.gone) delete found.values[key];
    for (const [list, rows] of Object.entries(message.add)) {
      const kept = found.lists[list].concat(rows);
      found.lists[list] = kept.slice(Math.max(0, kept.length - found.most[list]));
    }
  }
  if (name === "host") {
    const apart = Date.now() / 1000 - topics.get("host").values.time;
    // The message that took the least time says best how far the clocks are apart.
    offset = offset === null || Math.abs(apart - offset) > 5 ? apart : Math.min(offset, apart);
  }
}
