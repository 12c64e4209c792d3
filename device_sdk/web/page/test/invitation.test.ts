import { expect, test } from "vitest";
import {
  invitationField,
  linkedToken,
  PageError,
  readPageSettings,
  settingsWhenThere,
  takesPage,
  tokenOf,
  tokenProblem,
  typedToken,
} from "../shell/invitation.ts";

const TOKEN = "-a_9".repeat(11);
const page = { coordinator: ":8443", status: "status.json", title: "Digits", about: "Digits.", task: "digits" };

test("the token is in the link's fragment", () => {
  expect(tokenOf(`#token=${TOKEN}`)).toBe(TOKEN);
  expect(tokenOf(`#run=digits&token=${TOKEN}`)).toBe(TOKEN);
  expect([tokenOf(""), tokenOf("#"), tokenOf("#token="), tokenOf("#other=1")]).toEqual([null, null, null, null]);
});

test("a person may type the token or paste the whole link", () => {
  expect(typedToken(` ${TOKEN}\n`)).toBe(TOKEN);
  expect(typedToken(`https://host:8000/#token=${TOKEN}`)).toBe(TOKEN);
  expect(tokenProblem(typedToken(""))).toBeNull(); // none was given
  expect(tokenProblem(TOKEN)).toBeNull();
  expect(tokenProblem(TOKEN.slice(0, 20))).toContain("not a whole token");
  expect(tokenProblem(`${TOKEN} ${TOKEN}`)).toContain("not a whole token");
});

test("a token may bring the keys that its device is to trust", () => {
  const signed = `${TOKEN}.${"ab".repeat(32)}.${"cd".repeat(32)}`;
  expect(tokenProblem(signed)).toBeNull();
  expect(tokenProblem(typedToken(`https://host:8000/#token=${signed}`))).toBeNull();
  expect(tokenProblem(signed.slice(0, -1))).toContain("not a whole token");
});

test("a link's token outlives a page that is loaded again before the person agrees, and a newer link replaces it", () => {
  expect(linkedToken("", { invitation: TOKEN })).toBe(TOKEN);
  expect(linkedToken(`#token=${TOKEN}`, { invitation: "another" })).toBe(TOKEN);
  expect([linkedToken("", null), linkedToken("", { erased: true })]).toEqual([null, null]);
});

test("a whole token needs no look; a broken one is shown, and what is in the field counts", () => {
  expect(invitationField(null)).toEqual({ token: "", shown: true, problem: null });
  expect(invitationField(TOKEN)).toEqual({ token: TOKEN, shown: false, problem: null });
  const broken = TOKEN.slice(0, 30);
  expect(invitationField(broken)).toMatchObject({ token: broken, shown: true });
  expect(invitationField(broken).problem).toContain("cut off");
});

test("page.json is asked for until it is there", async () => {
  const settings = readPageSettings(page, "https://host.example/");
  const answers = [new PageError("offline"), new PageError("answered 503"), settings];
  const waited: [string, number][] = [];
  const found = await settingsWhenThere(
    async () => {
      const answer = answers.shift()!;
      if (answer instanceof Error) throw answer;
      return answer;
    },
    async (error, asked) => {
      waited.push([error.message, asked]);
    },
  );
  expect(found).toBe(settings);
  expect(waited).toEqual([
    ["offline", 1],
    ["answered 503", 2],
  ]);
});

test("page.json says whether the coordinator takes devices from this page, and whether it invites", () => {
  const pages = { origins: ["https://fleet.example"], port: 8000 };
  const takes = (address: string, coordinator = ":8443", given: unknown = pages): boolean | null =>
    takesPage(
      readPageSettings({ ...page, coordinator, pages: given }, address),
      new URL(address) as unknown as Location,
    );
  expect(takes("http://127.0.0.1:8000/")).toBe(true);
  expect(takes("http://localhost:8000/")).toBe(true);
  expect(takes("http://[::1]:8000/")).toBe(true);
  expect(takes("https://host.example:8000/")).toBe(true);
  expect(takes("https://fleet.example/", "wss://elsewhere.example/")).toBe(true);
  expect(takes("http://host.example:8000/")).toBe(false); // a name, without TLS
  expect(takes("http://127.0.0.1:8001/")).toBe(false); // a port that is forwarded
  expect(takes("http://localhost:8000/", "ws://127.0.0.1:8443")).toBe(false);
  expect(takes("https://other.example/", "wss://host.example:8443")).toBe(false);
  expect(takes("http://host.example:8000/", ":8443", null)).toBeNull();
  const invites = (given: unknown): boolean | null =>
    readPageSettings({ ...page, invites: given }, "https://host.example/").invites;
  expect([true, false, undefined].map(invites)).toEqual([true, false, null]);
});

test("page.json names the coordinator by its port, with the page's host and security, or whole", () => {
  const read = (coordinator: string, base: string): string =>
    readPageSettings({ ...page, coordinator }, base).coordinator;
  expect(read(":8443", "https://host.example:8000/page/")).toBe("wss://host.example:8443/");
  expect(read(":8443", "http://127.0.0.1:8000/")).toBe("ws://127.0.0.1:8443/");
  expect(read(":8443", "https://[2001:db8::1]:8000/")).toBe("wss://[2001:db8::1]:8443/");
  expect(read("wss://other.example:9", "https://host.example/")).toBe("wss://other.example:9/");
});

test("status.json is beside the page, or nowhere", () => {
  expect(readPageSettings(page, "https://host.example/page/").status).toBe("https://host.example/page/status.json");
  expect(readPageSettings({ ...page, status: null }, "https://host.example/").status).toBeNull();
  const { status: _, ...without } = page;
  expect(readPageSettings(without, "https://host.example/").status).toBeNull();
});

test.each([
  [null, "the task undefined"],
  [{ ...page, task: "poems" }, 'the task "poems"'],
  [{ ...page, coordinator: 8443 }, "no coordinator"],
  [{ ...page, coordinator: "https://host" }, "expected wss://HOST:PORT or :PORT"],
  [{ ...page, coordinator: "host" }, "expected wss://HOST:PORT or :PORT"],
  [{ ...page, coordinator: "ws://host:8443" }, "a page that came over https may connect to wss:// alone"],
  [{ ...page, status: 3 }, "no address as its status"],
])("a wrong page.json is named: %j", (found, text) => {
  expect(() => readPageSettings(found, "https://host.example/")).toThrow(PageError);
  expect(() => readPageSettings(found, "https://host.example/")).toThrow(text);
});
