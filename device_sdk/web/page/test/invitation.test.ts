import { expect, test } from "vitest";
import { PageError, readPageSettings, tokenOf, tokenProblem, typedToken } from "../shell/invitation.ts";

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
  [{ ...page, status: 3 }, "no address as its status"],
])("a wrong page.json is named: %j", (found, text) => {
  expect(() => readPageSettings(found, "https://host.example/")).toThrow(PageError);
  expect(() => readPageSettings(found, "https://host.example/")).toThrow(text);
});
