/** The service worker, which lets the page open without a network, and newer versions of the page. */

import { the } from "./elements.ts";

/** Register it where the browser allows that: over https, or on this machine. */
export async function workOffline(): Promise<void> {
  if (!("serviceWorker" in navigator)) return;
  const registration = await navigator.serviceWorker.register("sw.js").catch(() => null);
  if (registration === null) return;
  let asked = false;
  const offer = (): void => {
    if (registration.waiting !== null && navigator.serviceWorker.controller !== null) the("update").hidden = false;
  };
  offer();
  registration.addEventListener("updatefound", () => registration.installing?.addEventListener("statechange", offer));
  the("reload").addEventListener("click", () => {
    asked = true;
    registration.waiting?.postMessage("take over");
  });
  navigator.serviceWorker.addEventListener("controllerchange", () => {
    if (asked) location.reload();
  });
}

/** Remove the service worker and its copies of the page. */
export async function forgetOffline(): Promise<void> {
  if (!("serviceWorker" in navigator)) return;
  const scope = new URL("./", location.href).href;
  for (const registration of await navigator.serviceWorker.getRegistrations()) {
    if (registration.scope === scope) await registration.unregister();
  }
  for (const name of await caches.keys()) {
    if (name.startsWith(`fleetlearn-page ${scope} `)) await caches.delete(name);
  }
}
