/**
 * From where a device fetches contents by HTTP, which a coordinator names. The page allows hosts.
 *
 * A coordinator could otherwise have the device ask any server within its network. So the host must be the coordinator's
 * own or one that the page lists, and the path must end with the content's SHA-256. This machine is never a host that is
 * allowed unless the page lists it.
 */

const HOST = /^([a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[?[0-9a-f:.]+\]?)$/;
const LOOPBACK = /^(localhost|.*\.localhost|127\.[0-9.]+|\[::1\])$/;
/** Other names that lead to this machine, as URL writes them: 0.0.0.0, and IPv4 within IPv6. */
const HERE = /^(0\.0\.0\.0|\[::\]|\[::ffff:(7f[0-9a-f]{2}:[0-9a-f]+|0:0)\])$/;

/** Return the hosts from which a device fetches. coordinator: its address. downloadFrom: other hosts. Throws RangeError on
 * what cannot be a host. */
export function httpHosts(coordinator: string, downloadFrom: readonly string[] = []): Set<string> {
  const hosts = new Set<string>();
  for (const given of downloadFrom) {
    const host = given.toLowerCase();
    if (!HOST.test(host)) {
      throw new RangeError(
        `downloadFrom names ${given.slice(0, 100)}; expected a host's name or address without scheme, port and path`,
      );
    }
    hosts.add(host.includes(":") && !host.startsWith("[") ? `[${host}]` : host);
  }
  const { hostname } = new URL(coordinator);
  if (!LOOPBACK.test(hostname.replace(/\.$/, "")) && !HERE.test(hostname)) hosts.add(hostname);
  return hosts;
}

/** Return why the device does not fetch a content there, for people; null: it does. */
export function whyNotFrom(hosts: ReadonlySet<string>, url: string, sha256: string): string | null {
  let parts: URL;
  try {
    parts = new URL(url);
  } catch {
    return "the URL cannot be read";
  }
  const { hostname, protocol, pathname, username, password } = parts;
  if (username !== "" || password !== "") return "the URL has a user name or a password";
  if (!hosts.has(hostname)) {
    return `the page does not allow ${hostname}: downloadFrom names the hosts beside the coordinator's own`;
  }
  if (protocol === "http:" && !LOOPBACK.test(hostname)) return `${hostname} is another machine, and the URL has no TLS`;
  return pathname.endsWith(`/${sha256}`) ? null : "the URL's path does not end with the content's SHA-256";
}
