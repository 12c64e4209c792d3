/** What a page is shown of a session: the phase, by the connection and the work. */

import { expect, test } from "vitest";
import { activityOf } from "../../src/life/state.ts";
import type { Report, Task } from "../../src/protocol/messages.ts";
import { Session } from "../../src/session/session.ts";
import type { Link, Work } from "../../src/session/states.ts";

const task = { type: "task", task: "t", round: 3 } as Task;
const report = { type: "report", task: "t", round: 3 } as Report;
const assignment = { task, deadline: 9, arrived: [] };
const ONLINE: Link = { is: "online", heartbeatInterval: 1, nextHeartbeat: 1, chunkBytes: 1 };
const OFFLINE: Link = { is: "offline" };

test.each<[Work, Link, string, number | undefined]>([
  [{ is: "idle" }, ONLINE, "waiting", undefined],
  [{ is: "idle" }, OFFLINE, "connecting", undefined],
  [{ is: "locating", assignment }, ONLINE, "downloading", 3],
  [{ is: "locating", assignment }, OFFLINE, "connecting", 3],
  [{ is: "training", assignment }, ONLINE, "training", 3],
  [{ is: "training", assignment }, OFFLINE, "training", 3],
  [
    {
      is: "training",
      assignment: { ...assignment, task: { ...task, type: "question", kind: "evaluation", phase: 1, content: {} } },
    },
    ONLINE,
    "training",
    undefined,
  ],
  [{ is: "saving", result: report }, OFFLINE, "uploading", 3],
  [{ is: "holding", report, reportedAgain: false }, ONLINE, "uploading", 3],
  [{ is: "holding", report, reportedAgain: false }, OFFLINE, "connecting", 3],
  [
    { is: "answered", message: { type: "reply", task: "t", kind: "evaluation", content: {}, seconds: 1 } },
    ONLINE,
    "uploading",
    undefined,
  ],
])("%o with the link %o is %s", (work, link, phase, round) => {
  const session = new Session("d", 1);
  Object.assign(session, { work, link });
  const found = activityOf(session, false);
  expect([found.phase, found.round]).toEqual([phase, round]);
});

test("a device that was told when to come back waits", () => {
  expect(activityOf(new Session("d", 1), true)).toEqual({ phase: "waiting" });
});
