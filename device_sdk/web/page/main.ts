/** The page: reads whom it serves, asks for consent, and then shows the joined view. */

import { Joined } from "./joined.ts";
import { askConsent } from "./shell/consent.ts";
import { the, write } from "./shell/elements.ts";
import {
  isToken,
  linkedToken,
  PageError,
  type PageSettings,
  readPageSettings,
  settingsWhenThere,
  takesPage,
  tokenOf,
} from "./shell/invitation.ts";
import { notice } from "./shell/notices.ts";
import { workOffline } from "./shell/offline.ts";
import { NOTHING_CHOSEN, openRecords } from "./shell/records.ts";
import { placeWords } from "./shell/words.ts";

/** Milliseconds until page.json is asked for again, and the longest such wait. */
const EVERY = 2000;
const LONGEST = 30_000;

/** Return the token of the link, and take it out of the address bar. The tab's history entry keeps it until the person
 * agrees or closes the tab: a page that is loaded again still has it. */
function takeToken(): string | null {
  const token = linkedToken(location.hash, history.state);
  if (token !== null) remember({ invitation: token });
  return token;
}

/** Let the tab's history entry have this state alone. */
function remember(state: object | null): void {
  history.replaceState(state, "", location.pathname + location.search);
}

async function readSettings(): Promise<PageSettings> {
  let answer: Response;
  try {
    answer = await fetch("page.json", { cache: "no-cache" });
  } catch {
    throw new PageError("page.json cannot be fetched: you are offline, or the page's host does not answer");
  }
  if (!answer.ok) throw new PageError(`page.json cannot be fetched: the page's host answered ${answer.status}`);
  return readPageSettings(await answer.json().catch(() => null), document.baseURI);
}

/** Say that page.json is not there, and wait: for some time, or until there is a network again. */
function waitForSettings(error: Error, asked: number): Promise<void> {
  notice("page", {
    what: "This page does not know whom to train with.",
    advice: `It asks again by itself. (${error.message})`,
  });
  return new Promise((resolve) => {
    const timer = setTimeout(go, Math.min(LONGEST, EVERY * 2 ** Math.min(asked - 1, 10)));
    function go(): void {
      clearTimeout(timer);
      removeEventListener("online", go);
      resolve();
    }
    addEventListener("online", go);
  });
}

async function main(): Promise<void> {
  const erased = history.state?.erased === true;
  if (erased) remember(null);
  let invited = takeToken();
  // A link that is opened in this tab once more changes the fragment alone.
  addEventListener("hashchange", () => {
    if (tokenOf(location.hash) !== null) location.reload();
  });
  const records = await openRecords();
  records.onGone(() => {
    remember({ erased: true });
    location.reload();
  });
  if (!records.lasting) {
    notice("private", {
      what: "This browser keeps nothing for this page.",
      advice: "It may be a private window. Your drawings are gone when you close the tab.",
    });
  }
  if (erased) {
    notice("erased", {
      what: "Everything was erased.",
      advice: "This page keeps nothing on this device any more.",
    });
  }
  const settings = await settingsWhenThere(readSettings, waitForSettings);
  notice("page", null);
  document.title = settings.title;
  write("title", settings.title);
  write("coordinator", `The coordinator is ${new URL(settings.coordinator).host}.`);

  const showConsent = async (): Promise<void> => {
    // Before anybody draws: nothing that the person does here can help.
    const wrongPlace = takesPage(settings, location) === false;
    if (wrongPlace) notice("page", placeWords(location.origin, isSecureContext));
    the("joined").hidden = true;
    the("pill").hidden = true;
    the("consent").hidden = false;
    // Who leaves before the coordinator let the device in has an invitation that is not used.
    askConsent(settings, invited ?? (await records.choices()).token, async (given) => {
      invited = null;
      await records.choose((now) =>
        now.joined === settings.coordinator // in another tab
          ? { ...now, token: given ?? now.token }
          : { ...NOTHING_CHOSEN, admitted: now.admitted, joined: settings.coordinator, token: given },
      );
      remember(null);
      await showJoined();
      the("draw-title").focus();
    });
  };
  const showJoined = async (): Promise<void> => {
    the("consent").hidden = true;
    the("joined").hidden = false;
    notice("page", null);
    // A new link for somebody who joined before: perhaps the first invitation was withdrawn.
    const token = invited;
    invited = null;
    if (token !== null && isToken(token)) await records.choose((now) => ({ ...now, token }));
    else if (token !== null) {
      notice("invitation", {
        what: "The link that you opened is cut off: its token is not whole.",
        advice: "This device goes on as before. For a new invitation open the whole link.",
      });
    }
    remember(null);
    await joined.open();
    void workOffline();
  };
  const joined = new Joined(settings, records, () => {
    void showConsent();
    the("consent-title").focus();
  });
  if ((await records.choices()).joined === settings.coordinator) await showJoined();
  else await showConsent();
}

void main();
