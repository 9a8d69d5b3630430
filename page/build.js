// Builds graphmem/reports/page of this folder: `npm run build` here. The first line of the script says of what.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = "../graphmem/reports/page";
const sources = readdirSync(".")
  .filter((name) => /\.(js|css|json)$/.test(name))
  .sort();
const hash = createHash("sha256");
for (const name of sources) hash.update(`${name}\n${readFileSync(name, "utf8").replaceAll("\r\n", "\n")}\n`);

const libraries = ["uplot", "d3-hierarchy"].map((name) => {
  const { version, homepage } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  return `${name} ${version}, ${homepage}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}`;
});
const made = `Built by page/build.js of sources ${hash.digest("hex")}, with these libraries:`;
const said = [made, ...libraries].join("\n\n");

await build({
  entryPoints: ["page.js", "page.css"],
  bundle: true,
  minify: true,
  target: ["es2022"],
  format: "iife",
  legalComments: "none",
  outdir: out,
  outExtension: { ".js": ".js" },
});
writeFileSync(`${out}/page.js`, `/*\n${said}\n*/\n${readFileSync(`${out}/page.js`, "utf8")}`);
