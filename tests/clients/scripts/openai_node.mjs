// The official client for JavaScript: chat, streams, tools, `.parse`, `.runTools`, responses.
import OpenAI from 'openai'
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const client = new OpenAI()
const model = process.env.MODEL
const content = 'What is the weather in Paris?'
const messages = [{ role: 'user', content }]
const city = { type: 'string', enum: ['Paris', 'London'] }
const parameters = { type: 'object', properties: { city }, required: ['city'], additionalProperties: false }
const Weather = z.object({ city: z.enum(['Paris', 'London']), celsius: z.number().int().min(-40).max(50) })

for (const route of process.argv.slice(2)) {
  if (route === 'chat') {
    const plain = await client.chat.completions.create({ model, messages, max_tokens: 8 })
    console.log('chat:', plain.choices[0].finish_reason)

    const stream = client.chat.completions.stream({ model, messages, max_tokens: 8 })
    let events = 0
    for await (const _ of stream) events++
    console.log('stream:', events, 'events', (await stream.finalChatCompletion()).choices[0].finish_reason)

    const format = zodResponseFormat(Weather, 'weather')
    const told = await client.chat.completions.parse({ model, messages, response_format: format, max_tokens: 64 })
    console.log('parse:', JSON.stringify(Weather.parse(told.choices[0].message.parsed)))

    let called = ''
    const fn = async ({ city }) => (called = city) && `It is warm in ${city}.`
    const tools = [{ type: 'function', function: { name: 'weather', function: fn, parse: JSON.parse, parameters } }]
    const runner = client.chat.completions.runTools(
      { model, messages, tools, tool_choice: { type: 'function', function: { name: 'weather' } }, max_tokens: 96 },
      { maxChatCompletions: 2 }
    )
    await runner.done()
    if (called === '') throw new Error('no tool was called')
    console.log('runTools:', called)
  } else {
    const plain = await client.responses.create({ model, input: content, max_output_tokens: 16 })
    console.log('responses:', plain.status)

    const text = { format: zodTextFormat(Weather, 'weather') }
    const told = await client.responses.parse({ model, input: content, text, max_output_tokens: 64 })
    console.log('responses parse:', JSON.stringify(Weather.parse(told.output_parsed)))

    const tools = [{ type: 'function', name: 'weather', parameters, strict: true }]
    const stream = client.responses.stream({
      model, input: content, tools, tool_choice: 'required', parallel_tool_calls: false, max_output_tokens: 96
    })
    const kinds = new Set()
    for await (const event of stream) kinds.add(event.type)
    if (!kinds.has('response.function_call_arguments.done')) throw new Error('no call came')
    console.log('responses stream, a tool:', [...kinds].length, 'kinds of events')
  }
}
