// Vercel's AI SDK: text, streams, tools and objects, by the API that its argument names.
import { generateText, isStepCount, Output, streamText, tool } from 'ai'
import { z } from 'zod'

const at = { name: 'baton', baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY }
const providers = {
  chat: async () =>
    (await import('@ai-sdk/openai-compatible')).createOpenAICompatible({
      ...at,
      includeUsage: true,
      supportsStructuredOutputs: true
    }),
  messages: async () => (await import('@ai-sdk/anthropic')).createAnthropic(at)
}
const provider = await providers[process.argv[2]]()
const model = provider(process.env.MODEL)
const prompt = 'What is the weather in Paris?'
const city = z.enum(['Paris', 'London'])
const schema = z.object({ city, celsius: z.number().int().min(-40).max(50) })
const weather = tool({
  description: 'What the weather is like in a city.',
  inputSchema: z.object({ city }),
  execute: async ({ city }) => `It is warm in ${city}.`
})
const tools = { weather }

const plain = await generateText({ model, prompt, maxOutputTokens: 8 })
console.log('generateText:', plain.finishReason, plain.usage.totalTokens)

const stream = streamText({ model, prompt, maxOutputTokens: 8 })
let pieces = 0
for await (const _ of stream.textStream) pieces++
console.log('streamText:', pieces, 'pieces', (await stream.usage).totalTokens)

const object = await generateText({ model, prompt, output: Output.object({ schema }), maxOutputTokens: 64 })
console.log('Output.object:', JSON.stringify(schema.parse(object.output)))

const called = await generateText({ model, prompt, tools, toolChoice: 'required', maxOutputTokens: 96, temperature: 0 })
if (called.toolResults.length === 0) throw new Error('no tool was called')
console.log('tools:', called.toolResults[0].output)

const steps = streamText({
  model,
  prompt,
  tools,
  maxOutputTokens: 256,
  temperature: 0,
  stopWhen: isStepCount(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' })
})
let last
for await (const part of steps.fullStream) {
  if (part.type === 'error') throw part.error
  last = part.type
}
if ((await steps.steps).length !== 2) throw new Error('the result did not go back')
console.log('two steps in a stream: the last event is', last)
