// The page: who is signed in, which view is shown, how the connection is.

import { el, say, setVirtual } from "./dom.js";
import { look, resume, signIn, signOut, sinceNews, stop, who } from "./live.js";
import { audit } from "./audit_view.js";
import { device, devices } from "./device_views.js";
import { run } from "./run_view.js";
import { runs } from "./runs_view.js";

const VIEWS = [
  [/^#?\/?$/, runs, "runs"],
  [/^#\/run\/([^/?]+)$/, run, "runs"],
  [/^#\/devices(?:\?(.*))?$/, devices, "devices"],
  [/^#\/device\/([^/?]+)$/, device, "devices"],
  [/^#\/audit$/, audit, "audit"],
];
const main = document.getElementById("main");
const connection = document.getElementById("connection");
let current = null;
let state = "";

function showState() {
  connection.dataset.state = state === "live" && !who().replay && sinceNews() > 5 ? "lost" : state;
  const words = { live: "live", lost: "no connection; trying again", gone: "not there", "": "" };
  if (who().replay) words.live = "records";
  const late = state === "live" && !who().replay && sinceNews() > 5 ? `nothing for ${Math.round(sinceNews())} s` : null;
  say(connection, late ?? words[state] ?? "");
}

function heard(found) {
  state = found;
  if (found === "out") {
    state = "";
    route();
  }
  showState();
}

function header() {
  const places = document.getElementById("places");
  const whoBox = document.getElementById("who");
  if (who().name === null) {
    places.replaceChildren();
    whoBox.replaceChildren();
    return;
  }
  const entries = [["#/", "Runs", "runs"]];
  if (who().devices !== false) entries.push(["#/devices", "Devices", "devices"]);
  if (!who().replay) entries.push(["#/audit", "Audit log", "audit"]);
  places.replaceChildren(
    ...entries.map(([href, name, place]) =>
      el("a", { href, "aria-current": current?.place === place ? "page" : null }, name),
    ),
  );
  const words = who().replay ? who().title : `${who().name} (${who().role === "operate" ? "operates" : "views"})`;
  const out = el("button", { type: "button", class: "link", onclick: leave }, "Sign out");
  whoBox.replaceChildren(el("span", {}, words), ...(who().replay ? [] : [out]));
}

async function leave() {
  try {
    await signOut();
  } catch {
    await resume().catch(() => {});
  }
  heard("out");
}

function signInView(wrong = "") {
  document.title = "Sign in – fleetlearn";
  stop();
  state = "";
  current = null;
  header();
  showState();
  const error = el("p", { class: "error", role: "alert" }, wrong);
  const field = el("input", {
    id: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false",
  });
  const go = el("button", { class: "main" }, "Sign in");
  const form = el(
    "form",
    {
      onsubmit: async (event) => {
        event.preventDefault();
        go.disabled = true;
        try {
          await signIn(field.value);
          route();
        } catch (refused) {
          say(error, refused.message);
          field.select();
        } finally {
          go.disabled = false;
        }
      },
    },
    el("label", {}, "Administrator's token", field),
    error,
    go,
  );
  main.replaceChildren(
    el(
      "div",
      { class: "panel sign-in" },
      el("h1", {}, "Sign in"),
      el("p", { class: "quiet" }, "The command “fleetlearn-coordinator administrator add” makes a token."),
      form,
    ),
  );
  field.focus();
}

function route() {
  current?.view.close?.();
  setVirtual(Boolean(who().virtual));
  if (who().name === null) {
    signInView();
    return;
  }
  const hash = decodeHash(location.hash);
  const found = VIEWS.find(([pattern]) => pattern.test(hash));
  if (!found) {
    main.replaceChildren(el("h1", {}, "There is no such place"), el("a", { href: "#/" }, "All runs"));
    return;
  }
  const [pattern, make, place] = found;
  const root = el("div");
  const parameter = hash.match(pattern)[1];
  const view = make(root, parameter === undefined ? "" : decodeURIComponent(parameter));
  current = { view, place };
  main.replaceChildren(root);
  header();
  look(view.topics, view.update, heard);
  document.title = `${view.title} – fleetlearn`;
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
}

function decodeHash(hash) {
  try {
    decodeURIComponent(hash);
    return hash;
  } catch {
    return "#/";
  }
}

// A link may bring a token, behind #: browsers send that to nobody.
async function begin() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) history.replaceState(null, "", location.pathname);
  try {
    await (token ? signIn(token) : resume());
  } catch (error) {
    signInView(error.message);
    return;
  }
  route();
}

addEventListener("hashchange", () => {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) begin();
  else if (location.hash !== "#main") route();
});
setInterval(() => {
  showState();
  current?.view.tick?.();
}, 1000);
begin();
