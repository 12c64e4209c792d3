/** Whether the device charges, and whether its network is metered, where the browser can tell. */

import { connectionNow } from "./network.ts";

/** null: the browser does not say. */
export interface Surroundings {
  readonly charging: boolean | null;
  readonly network: "metered" | "unmetered" | null;
}
export const UNKNOWN: Surroundings = { charging: null, network: null };

/** What a person asks for: a device serves only while it holds. */
export interface Conditions {
  readonly charging?: boolean;
  readonly unmetered?: boolean;
}

interface Battery extends EventTarget {
  readonly charging: boolean;
}

/** Return what a connection is. One whose user asked to save data is metered. */
export function networkOf(
  connection: { type?: string; saveData?: boolean; metered?: boolean } | undefined,
): Surroundings["network"] {
  if (connection === undefined) return null;
  const { type, saveData, metered } = connection;
  if (saveData === true || metered === true || type === "cellular") return "metered";
  return metered === false || type === "wifi" || type === "ethernet" ? "unmetered" : null;
}

/** Return why a device must not serve now, for people, or null; and which of the conditions nobody can tell. */
export function checkConditions(
  { charging = false, unmetered = false }: Conditions,
  now: Surroundings,
): { why: string | null; cannotTell: ("charging" | "network")[] } {
  const waits = [
    ...(charging && now.charging === false ? ["charges"] : []),
    ...(unmetered && now.network === "metered" ? ["is on an unmetered network"] : []),
  ];
  return {
    why: waits.length > 0 ? `the device waits until it ${waits.join(" and ")}` : null,
    cannotTell: [
      ...(charging && now.charging === null ? ["charging" as const] : []),
      ...(unmetered && now.network === null ? ["network" as const] : []),
    ],
  };
}

/** Call `tell` now, and whenever it changes. Returns a function that ends this. A worker is not told of the battery. */
export function watchSurroundings(tell: (now: Surroundings) => void): () => void {
  const connection = connectionNow();
  let battery: Battery | null = null;
  let over = false;
  const told = (): void => {
    if (!over) tell({ charging: battery?.charging ?? null, network: networkOf(connection) });
  };
  told();
  connection?.addEventListener("change", told);
  const { getBattery } = (globalThis.navigator ?? {}) as { getBattery?: () => Promise<Battery> };
  getBattery?.call(navigator).then(
    (found) => {
      battery = found;
      battery.addEventListener("chargingchange", told);
      told();
    },
    () => {}, // the page may not know
  );
  return () => {
    over = true;
    connection?.removeEventListener("change", told);
    battery?.removeEventListener("chargingchange", told);
  };
}
