/** The page: reads whom it serves, asks for consent, and then shows the joined view. */

import { Joined } from "./joined.ts";
import { askConsent } from "./shell/consent.ts";
import { the, write } from "./shell/elements.ts";
import { PageError, type PageSettings, readPageSettings, tokenOf } from "./shell/invitation.ts";
import { notice } from "./shell/notices.ts";
import { workOffline } from "./shell/offline.ts";
import { NOTHING_CHOSEN, openRecords } from "./shell/records.ts";

/** Return the token of the link, and take it out of the address bar and the history. */
function takeToken(): string | null {
  const token = tokenOf(location.hash);
  if (token !== null) history.replaceState(null, "", location.pathname + location.search);
  return token;
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

async function main(): Promise<void> {
  let token = takeToken();
  const records = await openRecords();
  if (!records.lasting) {
    notice("private", {
      what: "This browser keeps nothing for this page.",
      advice: "It may be a private window. Your drawings are gone when you close the tab.",
    });
  }
  if (history.state?.erased === true) {
    history.replaceState(null, "");
    notice("done", { what: "Everything was erased.", advice: "This page keeps nothing on this device any more." });
  }
  let settings: PageSettings;
  try {
    settings = await readSettings();
  } catch (error) {
    notice("page", {
      what: "This page does not know whom to train with.",
      advice: `Reload it later. (${(error as Error).message})`,
    });
    return;
  }
  document.title = settings.title;
  write("title", settings.title);
  write("coordinator", `The coordinator is ${new URL(settings.coordinator).host}.`);

  const showConsent = (): void => {
    the("joined").hidden = true;
    the("pill").hidden = true;
    the("consent").hidden = false;
    askConsent(settings, token, async (given) => {
      token = null;
      await records.choose(() => ({ ...NOTHING_CHOSEN, joined: settings.coordinator, token: given }));
      await showJoined();
      the("draw-title").focus();
    });
  };
  const showJoined = async (): Promise<void> => {
    the("consent").hidden = true;
    the("joined").hidden = false;
    // A new link for somebody who joined before: perhaps the first invitation was withdrawn.
    const given = token;
    if (given !== null) await records.choose((now) => ({ ...now, token: given }));
    token = null;
    await joined.open();
    void workOffline();
  };
  const joined = new Joined(settings, records, () => {
    showConsent();
    the("consent-title").focus();
  });
  if ((await records.choices()).joined === settings.coordinator) await showJoined();
  else showConsent();
}

void main();
