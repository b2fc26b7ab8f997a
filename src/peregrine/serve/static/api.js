// Draws the server's own OpenAPI description; nothing is loaded from anywhere else.

const main = document.getElementById("endpoints");

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function resolve(schema, all) {
  return schema?.$ref ? resolve(all[schema.$ref.split("/").pop()], all) : schema ?? {};
}

function kind(schema, all) {
  if (schema.$ref) {
    const named = resolve(schema, all);
    return named.properties ? "object" : kind(named, all);
  }
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return [...new Set(either.map((one) => kind(one, all)))].filter((word) => word !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${kind(schema.items ?? {}, all)}`;
  return schema.type ?? "any";
}

function limits(schema) {
  const parts = [schema, ...(schema.anyOf ?? [])];
  const words = schema.description ? [schema.description.replace(/\.$/, "")] : [];
  for (const part of parts) {
    if (part.minimum !== undefined) words.push(`at least ${part.minimum}`);
    if (part.exclusiveMinimum !== undefined) words.push(`above ${part.exclusiveMinimum}`);
    if (part.maximum !== undefined) words.push(`at most ${part.maximum}`);
  }
  if (schema.default !== undefined && schema.default !== null) words.push(`default ${JSON.stringify(schema.default)}`);
  return words.join("; ");
}

function fieldTable(fields, all) {
  const table = element("table");
  const head = table.appendChild(element("tr"));
  for (const title of ["field", "type", ""]) head.append(element("th", title));
  for (const { name, schema, required } of fields) {
    const row = table.appendChild(element("tr"));
    row.append(element("td", required ? `${name} *` : name), element("td", kind(schema, all)), element("td", limits(schema)));
  }
  return table;
}

function fieldsOf(operation, all) {
  const asked = (operation.parameters ?? []).map((p) => ({ name: p.name, schema: p.schema ?? {}, required: p.required }));
  const body = resolve(operation.requestBody?.content?.["application/json"]?.schema, all);
  const required = new Set(body.required ?? []);
  const sent = Object.entries(body.properties ?? {}).map(([name, schema]) => ({ name, schema, required: required.has(name) }));
  // The description begins with the fields that have no effect; here they come last.
  const begin = Math.max(0, sent.findIndex(({ name }) => name === "model"));
  const useful = [...sent.slice(begin), ...sent.slice(0, begin)];
  return [...asked, ...useful.sort((one, other) => rank(one) - rank(other))];
}

/** The model comes first, then what is required or is the prompt; the rest stays in its order. */
function rank({ name, required }) {
  return name === "model" ? 0 : required || name === "prompt" ? 1 : 2;
}

function section(path, method, operation, all) {
  const made = element("section", undefined, "endpoint");
  const title = made.appendChild(element("h2"));
  title.append(element("span", method.toUpperCase(), "method"), ` ${path}`);
  if (operation.description) made.append(element("p", operation.description));
  const fields = fieldsOf(operation, all);
  if (fields.length) made.append(fieldTable(fields, all));
  made.append(element("p", `Statuses: ${Object.keys(operation.responses ?? {}).join(", ")}`, "answers"));
  return made;
}

try {
  const description = await (await fetch("/openapi.json")).json();
  const all = description.components?.schemas ?? {};
  main.replaceChildren();
  const begins = (path) => Number(path !== "/v1/chat/completions"); // what most readers look for
  const paths = Object.entries(description.paths).sort(([one], [other]) => begins(one) - begins(other));
  for (const [path, methods] of paths) {
    for (const [method, operation] of Object.entries(methods)) main.append(section(path, method, operation, all));
  }
} catch (error) {
  main.textContent = `The description could not be read: ${error}. Is the server still running?`;
}
