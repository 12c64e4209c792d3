/** Charging and the network: what holds the device back, and what nobody can tell. */

import { describe, expect, test } from "vitest";
import {
  checkConditions,
  networkOf,
  type Surroundings,
  UNKNOWN,
  watchSurroundings,
} from "../../src/life/surroundings.ts";

describe("the network", () => {
  test.each([
    [undefined, null],
    [{}, null], // a computer's browser does not say
    [{ type: "cellular" }, "metered"],
    [{ type: "wifi" }, "unmetered"],
    [{ type: "ethernet" }, "unmetered"],
    [{ type: "wifi", saveData: true }, "metered"],
    [{ type: "wifi", metered: true }, "metered"],
    [{ metered: false }, "unmetered"],
    [{ type: "bluetooth" }, null],
  ])("%o is %s", (connection, expected) => {
    expect(networkOf(connection)).toBe(expected);
  });
});

describe("conditions", () => {
  const both = { charging: true, unmetered: true };

  test("that are not asked for hold nothing back", () => {
    expect(checkConditions({}, { charging: false, network: "metered" })).toEqual({ why: null, cannotTell: [] });
  });
  test("that do not hold are named", () => {
    expect(checkConditions(both, { charging: false, network: "metered" }).why).toBe(
      "the device waits until it charges and is on an unmetered network",
    );
    expect(checkConditions(both, { charging: true, network: "metered" }).why).toBe(
      "the device waits until it is on an unmetered network",
    );
  });
  test("of which the browser says nothing hold nothing back, and are named", () => {
    expect(checkConditions(both, UNKNOWN)).toEqual({ why: null, cannotTell: ["charging", "network"] });
    expect(checkConditions({ charging: true }, UNKNOWN).cannotTell).toEqual(["charging"]);
  });
});

test("where there is no browser, nothing is known", () => {
  const told: Surroundings[] = [];
  watchSurroundings((now) => told.push(now))();
  expect(told).toEqual([UNKNOWN]);
});
