/** The first view: what happens here, and whether the person wants it. */

import { the, write } from "./elements.ts";
import { type PageSettings, tokenProblem, typedToken } from "./invitation.ts";

/** Show the view. `invited`: the token came with the link. `join` is called with the token once the person agrees. */
export function askConsent(settings: PageSettings, invited: string | null, join: (token: string | null) => void): void {
  write("about", settings.about);
  the("token-field").hidden = invited !== null;
  the("token-there").hidden = invited === null;
  const input = the<HTMLInputElement>("token");
  const hint = the("token-hint");
  const usual = hint.textContent ?? "";
  the<HTMLFormElement>("join").onsubmit = (event) => {
    event.preventDefault();
    const token = invited ?? typedToken(input.value);
    const problem = tokenProblem(token);
    input.setAttribute("aria-invalid", String(problem !== null));
    hint.classList.toggle("wrong", problem !== null);
    hint.textContent = problem ?? usual;
    if (problem !== null) {
      the("token-field").hidden = false;
      input.focus();
      return;
    }
    input.value = "";
    join(token === "" ? null : token);
  };
}
