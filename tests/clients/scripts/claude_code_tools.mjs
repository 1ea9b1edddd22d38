// Claude Code with its own tools: a call that is forced, its result, and a choice of any of them.
import { spawn } from 'node:child_process'
import { createServer } from 'node:http'
import { fileURLToPath } from 'node:url'

const claude = fileURLToPath(new URL('node_modules/.bin/claude', import.meta.url))
const server = process.env.ANTHROPIC_BASE_URL
const asked = []

// It forwards what Claude Code asks, and forces the first call: of a tool that takes no arguments.
const between = createServer(async (request, response) => {
  const chunks = []
  for await (const chunk of request) chunks.push(chunk)
  let body = chunks.length ? Buffer.concat(chunks).toString() : undefined
  if (request.method === 'POST' && request.url.startsWith('/v1/messages?')) {
    const told = JSON.parse(body)
    if (told.tools?.length) {
      if (!asked.length) told.tool_choice = { type: 'tool', name: 'CronList' }
      asked.push(told)
      body = JSON.stringify(told)
    }
  }
  const headers = { 'content-type': 'application/json', 'anthropic-version': '2023-06-01' }
  const answer = await fetch(server + request.url, { method: request.method, headers, body })
  response.writeHead(answer.status, { 'content-type': answer.headers.get('content-type') ?? 'text/plain' })
  for await (const chunk of answer.body ?? []) response.write(chunk)
  response.end()
})
await new Promise((ready) => between.listen(0, '127.0.0.1', ready))

const env = {
  PATH: process.env.PATH,
  HOME: process.cwd(),
  ANTHROPIC_BASE_URL: `http://127.0.0.1:${between.address().port}`,
  ANTHROPIC_AUTH_TOKEN: process.env.ANTHROPIC_API_KEY,
  ANTHROPIC_MODEL: process.env.MODEL,
  ANTHROPIC_DEFAULT_HAIKU_MODEL: process.env.MODEL,
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: '48',
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: '1'
}
const client = spawn(claude, ['-p', 'List the jobs.'], { env, stdio: ['ignore', 'ignore', 'inherit'] })
await new Promise((ended) => client.on('exit', ended))
between.close()

const [first, second] = asked
const results = second.messages.flatMap((each) => each.content).filter((each) => each.type === 'tool_result')
if (!results.length) throw new Error('no result of the call came back')
console.log(first.tools.length, 'tools; a call and its result:', JSON.stringify(results[0].content).slice(0, 40))

const tools = first.tools.map((each) => ({ ...each, strict: true }))
for (const more of [{}, { tools }, { tools, stream: true }]) {
  const body = JSON.stringify({ ...first, stream: false, max_tokens: 200, ...more, tool_choice: { type: 'any' } })
  const headers = { 'content-type': 'application/json' }
  const answer = await fetch(`${server}/v1/messages`, { method: 'POST', headers, body })
  const text = await answer.text()
  if (!answer.ok || !text.includes('"tool_use"')) throw new Error(`any of its tools: ${text.slice(0, 300)}`)
}
console.log('any of them: whole, strict, and strict in a stream')
