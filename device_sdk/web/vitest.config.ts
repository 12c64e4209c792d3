import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["test/**/*.test.ts", "page/test/**/*.test.ts"],
    testTimeout: 60_000, // a busy machine is no failure
    coverage: { include: ["src/**"], reporter: ["text"] },
  },
});
