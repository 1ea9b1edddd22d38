// Types of zod with an answer each, as JSON Schema: zod_types.json beside this file. Made anew by
//   npm install --prefix /tmp/zod zod@4 && NODE_PATH=/tmp/zod/node_modules node zod_types.mjs > zod_types.json
import { createRequire } from "node:module";
const { z } = createRequire(import.meta.url)("zod");

const Node = z.object({ name: z.string(), get children() { return z.array(Node); } });
const cat = z.object({ kind: z.literal("cat"), lives: z.int() });
const dog = z.object({ kind: z.literal("dog"), name: z.string() });
const types = {
  string: [z.string(), "any"],
  "string with lengths": [z.string().min(2).max(6), "four"],
  "string with a regex": [z.string().regex(/^[a-z]{2,4}$/), "abc"],
  "string with a beginning and an end": [z.string().startsWith("ab").endsWith("yz"), "ab and yz"],
  "string with a part": [z.string().includes("mid"), "a mid b"],
  "string in capitals": [z.string().uppercase(), "ABC"],
  email: [z.email(), "ann@example.com"],
  url: [z.url(), "https://example.com/a?b=c"],
  uuid: [z.uuid(), "3fa85f64-5717-4562-b3fc-2c963f66afa6"],
  "addresses": [z.object({ a: z.ipv4(), b: z.ipv6(), c: z.cidrv4() }), { a: "10.0.0.1", b: "::1", c: "10.0.0.0/8" }],
  "dates and times": [
    z.object({ d: z.iso.date(), t: z.iso.time(), dt: z.iso.datetime() }),
    { d: "2024-02-29", t: "10:20:30", dt: "2024-02-29T10:20:30Z" },
  ],
  duration: [z.iso.duration(), "P1DT2H"],
  base64: [z.base64(), "aGVsbG8="],
  jwt: [z.jwt(), "eyJhbGciOiJIUzI1NiJ9.e30.c2ln"],
  emoji: [z.emoji(), "😀"],
  identifiers: [
    z.object({ c: z.cuid2(), u: z.ulid(), n: z.nanoid() }),
    { c: "tz4a98xxat96iws9zmbrgj3a", u: "01ARZ3NDEKTSV4RRFFQ69G5FAV", n: "V1StGXR8_Z5jdHi6B-myT" },
  ],
  "template literal": [z.templateLiteral(["v", z.int(), ".", z.enum(["a", "b"])]), "v12.a"],
  number: [z.number(), -1.5],
  "number of 64 bits": [z.float64(), 2.5],
  "int with bounds": [z.int().min(1).max(9), 7],
  "positive, of a multiple": [z.number().positive().multipleOf(0.5), 1.5],
  "boolean, null, literals": [z.object({ b: z.boolean(), n: z.null(), l: z.literal(["x", 7]) }), { b: true, n: null, l: 7 }],
  enum: [z.enum(["red", "green"]), "green"],
  array: [z.array(z.string()).min(1).max(3), ["a", "b"]],
  tuple: [z.tuple([z.string(), z.number()]).rest(z.boolean()), ["a", 1, true]],
  "object with optional members": [
    z.object({ a: z.string(), b: z.number().optional(), c: z.string().default("x"), d: z.string().nullable() }),
    { a: "a", b: 1, c: "c", d: null },
  ],
  "strict and loose objects": [
    z.object({ s: z.strictObject({ a: z.int() }), l: z.looseObject({ a: z.int() }) }),
    { s: { a: 1 }, l: { a: 1, b: "c" } },
  ],
  "object with a member that is never": [z.object({ a: z.int(), b: z.never().optional() }), { a: 1 }],
  record: [z.record(z.string(), z.number()), { a: 1, "b c": 2.5 }],
  "record of an enum": [z.record(z.enum(["a", "b"]), z.int()), { a: 1, b: 2 }],
  "partial record": [z.partialRecord(z.enum(["a", "b"]), z.int()), { b: 2 }],
  "record of a pattern": [z.record(z.string().regex(/^k[0-9]$/), z.int()), { k1: 1, k2: 2 }],
  "record of numbers": [z.record(z.number(), z.string()), { "1.5": "a" }],
  union: [z.union([z.string(), z.number(), z.array(z.int())]), [1, 2]],
  "discriminated union": [z.discriminatedUnion("kind", [cat, dog]), { kind: "dog", name: "Rex" }],
  intersection: [z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })), { a: "a", b: 1 }],
  "recursive object": [Node, { name: "a", children: [{ name: "b", children: [] }] }],
  "described": [z.object({ a: z.string().describe("A.").meta({ examples: ["x"] }) }).readonly(), { a: "b" }],
};
const made = {};
for (const [name, [type, example]] of Object.entries(types)) {
  type.parse(example);
  made[name] = { schema: z.toJSONSchema(type), example };
}
console.log(JSON.stringify(made, null, 1));
