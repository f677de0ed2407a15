"""The chat template of a server for models that were trained to call tools in the words of Qwen2.5's template
and whose own has others, or knows no tools (Qwen2.5-VL, Qwen3.5)."""

from __future__ import annotations

import json

from trainer.data.processor import Prompter
from trainer.turns.calls import OFFER, SYSTEM, as_result

SCHEMAS = "the schemas"
BEFORE, BEHIND = OFFER.format(schemas=SCHEMAS).split(SCHEMAS)
RESULT = as_result("")

OFFERED = f"""\
{{%- if tools -%}}
{{%- set asked = namespace(schemas='', turns=[], rest=messages) -%}}
{{%- for tool in tools -%}}
{{%- set asked.schemas = asked.schemas ~ ('' if loop.first else '\\n') ~ (tool | tojson) -%}}
{{%- endfor -%}}
{{%- set offer = {json.dumps(BEFORE)} ~ asked.schemas ~ {json.dumps(BEHIND)} -%}}
{{%- set system = {json.dumps(SYSTEM)} -%}}
{{%- if messages[0].role == 'system' -%}}
{{%- set system = messages[0].content -%}}
{{%- set asked.rest = messages[1:] -%}}
{{%- endif -%}}
{{%- if system is string -%}}
{{%- set system = system ~ offer -%}}
{{%- else -%}}
{{%- set system = system + [{{'type': 'text', 'text': offer}}] -%}}
{{%- endif -%}}
{{%- set asked.turns = [{{'role': 'system', 'content': system}}] -%}}
{{%- for message in asked.rest -%}}
"""
"""Puts the offer behind the system message, and begins a loop over the other messages."""
CALLED = """\
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- set said = namespace(text='') -%}
{%- if message.content is string -%}
{%- set said.text = message.content -%}
{%- elif message.content -%}
{%- for part in message.content -%}
{%- set said.text = said.text ~ part.text -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls -%}
{%- set arguments = call.function.arguments -%}
{%- if arguments is not string -%}
{%- set arguments = arguments | tojson -%}
{%- endif -%}
{%- set said.text = said.text ~ ('\\n' if said.text else '') ~ '<tool_call>\\n{"name": '
    ~ (call.function.name | tojson) ~ ', "arguments": ' ~ arguments ~ '}\\n</tool_call>' -%}
{%- endfor -%}
{%- set turn = {'role': 'assistant', 'content': said.text} -%}
"""
"""A reply that called a tool, as the model wrote it."""
ANSWERED = f"""\
{{%- elif message.role == 'tool' and message.content is string -%}}
{{%- set turn = {{'role': 'user', 'content': {json.dumps(RESULT[0])} ~ message.content
    ~ {json.dumps(RESULT[1])}}} -%}}
{{%- elif message.role == 'tool' -%}}
{{%- set turn = {{'role': 'user', 'content': [{{'type': 'text', 'text': {json.dumps(RESULT[0])}}}]
    + message.content + [{{'type': 'text', 'text': {json.dumps(RESULT[1])}}}]}} -%}}
"""
"""What a tool returned, for templates that know of none."""
END = """\
{%- else -%}
{%- set turn = message -%}
{%- endif -%}
{%- set asked.turns = asked.turns + [turn] -%}
{%- endfor -%}
{%- set messages = asked.turns -%}
{%- set tools = none -%}
{%- endif -%}
"""


def tool_template(prompter: Prompter) -> str:
    """A template with the tokens of training for requests that offer tools, and the model's own for all
    others; "" where its own is right."""
    if prompter.offers_tools and prompter.writes_results:
        return ""
    answered = "" if prompter.writes_results else ANSWERED
    return OFFERED + CALLED + answered + END + prompter.chat_template
