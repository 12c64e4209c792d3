/** The first view: what happens here, and whether the person wants it. */

import { the, write } from "./elements.ts";
import { invitationField, type PageSettings, tokenProblem, typedToken } from "./invitation.ts";

const USUAL = "A link that you were sent, or its QR code, fills this in. Leave it empty if you were given none.";

/** Show the view. `invited`: the token that the link brought. `join` is called with the token once the person agrees. */
export function askConsent(settings: PageSettings, invited: string | null, join: (token: string | null) => void): void {
  const input = the<HTMLInputElement>("token");
  const say = (problem: string | null): void => {
    input.setAttribute("aria-invalid", String(problem !== null));
    the("token-hint").classList.toggle("wrong", problem !== null);
    write("token-hint", problem ?? USUAL);
  };
  const show = (shown: boolean): void => {
    the("token-field").hidden = !shown;
    the("token-there").hidden = shown;
  };
  const { token, shown, problem } = invitationField(invited);
  write("about", settings.about);
  input.value = token;
  show(shown);
  say(problem);
  the("token-change").onclick = () => {
    show(true);
    input.select();
  };
  the<HTMLFormElement>("join").onsubmit = (event) => {
    event.preventDefault();
    const token = typedToken(input.value);
    const wrong = tokenProblem(token);
    say(wrong);
    if (wrong !== null) {
      show(true);
      input.focus();
      return;
    }
    input.value = "";
    join(token === "" ? null : token);
  };
}
