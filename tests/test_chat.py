"""Chat templates against Hugging Face's renderer, and what no template may do."""
from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ggraph.chat import ChatTemplate
from ggraph.errors import TemplateError

GOLDEN = Path(__file__).parent / "golden/templates"
DATA = json.loads((GOLDEN / "expected.json").read_text())
HI = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def render(source: str, messages: list[Any] = HI, **kwargs: Any) -> str:
    return ChatTemplate(source).render(messages, **kwargs)


@pytest.mark.parametrize("name, case", [(name, case) for name, cases in DATA["expected"].items() for case in cases])
def test_goldens(name: str, case: str) -> None:
    template = ChatTemplate((GOLDEN / name).read_text(), bos_token=DATA["bos_token"], eos_token=DATA["eos_token"])
    assert template.render(**DATA["cases"][case]) == DATA["expected"][name][case]


def test_variables() -> None:
    source = "{{ bos_token }}{{ enable_thinking is defined and enable_thinking }}{{ add_generation_prompt }}{{ eos_token }}"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render(HI) == "<s>FalseTrue</s>"
    assert template.render(HI, enable_thinking=True, add_generation_prompt=False) == "<s>TrueFalse</s>"
    assert render("{{ tools is none }}{{ documents is none }}", tools=[]) == "TrueTrue"


def test_white_space_as_hugging_face_has_it() -> None:
    assert render("a\n  {% if true %}\n  b\n  {% endif %}\nc\n") == "a\n  b\nc"


def test_loop_controls_generation_and_dates() -> None:
    assert render("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
                  "{% endfor %}") == "023"
    assert render("a{% generation %}{% set x = 1 %}b{{ x }}{% endgeneration %}c") == "ab1c"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", render('{{ strftime_now("%Y-%m-%d") }}'))


@pytest.mark.parametrize("call, text", [
    ("tojson", '{"b": "é<\'&>", "a": [1, null]}'),
    ("tojson(ensure_ascii=True)", '{"b": "\\u00e9<\'&>", "a": [1, null]}'),
    ("tojson(indent=1)", '{\n "b": "é<\'&>",\n "a": [\n  1,\n  null\n ]\n}'),
    ("tojson(separators=(',', ':'))", '{"b":"é<\'&>","a":[1,null]}'),
    ("tojson(sort_keys=True)", '{"a": [1, null], "b": "é<\'&>"}'),
])
def test_tojson(call: str, text: str) -> None:
    assert render("{{ x|" + call + " }}", x={"b": "é<'&>", "a": [1, None]}) == text


def called(arguments: Any, content: Any = "") -> list[Any]:
    function = {"name": "f", "arguments": arguments}
    return [*HI, {"role": "assistant", "content": content, "tool_calls": [{"id": "call00001", "type": "function",
                                                                           "function": function}]}]


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}[ARGS]{% endfor %}{% endfor %}"
ITERATES = CALLS.replace("ARGS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}")
WRITES_JSON = CALLS.replace("ARGS", "{{ c.function.arguments | tojson }}")
PRINTS = CALLS.replace("ARGS", "{{ c.function.arguments }}")
EITHER = CALLS.replace("ARGS", "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
                       "{{ c.function.arguments | tojson }}{% endif %}")


def test_tool_call_arguments_from_text() -> None:
    text = '{"a":  1}'
    assert render(ITERATES, called(text)) == render(ITERATES, called({"a": 1})) == "Hi[a=1 ]"
    assert render(WRITES_JSON, called(text)) == 'Hi[{"a": 1}]'
    assert render(PRINTS, called(text)) == render(EITHER, called(text)) == 'Hi[{"a":  1}]'
    assert render(ITERATES, called("")) == render(ITERATES, called(" ")) == "Hi[]"


def test_two_calls_stay_two() -> None:
    messages = called('{"a": 1}')
    messages[1]["tool_calls"] *= 2
    assert render(ITERATES, messages) == "Hi[a=1 ][a=1 ]"


def test_broken_arguments_name_the_message() -> None:
    with pytest.raises(TemplateError, match=r"messages\[1\].tool_calls\[0\].function.arguments is not valid JSON: "):
        render(ITERATES, called("{"))
    assert render(PRINTS, called("{")) == "Hi[{]"
    with pytest.raises(TemplateError, match=r"messages\[1\].tool_calls\[0\] is not an object"):
        render(ITERATES, [*HI, {"role": "assistant", "tool_calls": [5]}])


def test_the_caller_s_messages_stay_as_they_are() -> None:
    messages = called('{"a": 1}', None)
    before = json.dumps(messages)
    render(ITERATES, messages)
    assert json.dumps(messages) == before


def test_content_that_is_none() -> None:
    assert render(PRINTS, called("{}", None)) == "Hi[{}]"
    checks = PRINTS.replace("{{ m.content }}", "{{ '-' if m.content is none else m.content }}")
    assert render(checks, called("{}", None)) == "Hi-[{}]"


def test_content_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    only_parts = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert render(PLAIN, parts) == "user:a\nb;"
    assert render(only_parts, parts) == "<a><b>"
    assert render(only_parts) == "<Hi>"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(TemplateError, match=r"messages\[0\].content has a part of type 'image_url': only text"):
        render(only_parts, image)


@pytest.mark.parametrize("messages, message", [
    (["Hi"], r"messages\[0\] is not an object"),
    ([*HI, {"role": "user", "content": 5}], r"messages\[1\].content is neither text nor a list"),
    ([{"role": "assistant", "tool_calls": 5}], r"messages\[0\].tool_calls is not a list"),
    ([{"role": "user", "content": ["a"]}], r"messages\[0\].content has a part of type None"),
])
def test_bad_messages(messages: list[Any], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render(PLAIN, messages)


def test_the_template_s_own_words() -> None:
    with pytest.raises(TemplateError) as error:
        render("{{ raise_exception('System role <not> supported') }}")
    assert str(error.value) == "System role <not> supported"


@pytest.mark.parametrize("source, message", [
    ("a\n{% for %}", "does not compile, line 2: "),
    ("{{ x | no_such_filter }}", "does not compile, line 1: No filter named 'no_such_filter'"),
    ("{{ ((" * 3000, "does not compile"),
    ("a\nb{{ x.y.z }}", "failed in line 2: 'x' is undefined"),
    ("{{ messages[0].nothing | tojson }}", "failed in line 1: Object of type Undefined is not JSON serializable"),
    ("{{ 1 + 'a' }}", "failed in line 1: unsupported operand"),
    ("{{ 1 / 0 }}", "failed in line 1: division by zero"),
    ("{% include 'x' %}", "failed"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failed"),
    ("{% set _ = messages.append(1) %}", "failed in line 1: "),
])
def test_failures(source: str, message: str) -> None:
    with pytest.raises(TemplateError) as error:
        render(source)
    assert message in str(error.value)


@pytest.mark.parametrize("source", [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ (''|attr('__class__')) }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ tojson.__wrapped__ }}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
])
def test_no_way_to_python(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize("source", [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [0] * 10**10 }}",
    "{{ 10**(10**10) }}",
    "{% set ns = namespace(n=3) %}{% for i in range(64) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace(s='xxxx') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xxxx') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(64) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(64) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l|tojson }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.ljust(width=10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**10) }}",
    "{{ ('x' * 10**6) | replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "{{ ['x' * 10**6] * 10**6 }}",
    "{{ (['x' * 10**5] * 10**4) | join('x') }}",
    "{{ ('x' * 10**5).join(['y'] * 10**5) }}",
    "{{ range(99999) | map('string') | join('x' * 10**5) }}",
    "{{ range(99999) | join('x' * 10**5) }}",
    "{{ ('x' * 10**5).join(range(99999) | map('string')) }}",
    "{{ ('\\n' * 10**5) | indent(10**6, true, true) }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ ([1] * 10**5) | tojson(indent=10**4) }}",
    "{{ [1] | batch(10**10, 0) | list }}",
    "{{ [1] | slice(10**10) | list }}",
    "{{ '\\t'.expandtabs(10**10) }}",
    "{{ 'a b' | wordwrap(1, wrapstring='x' * 10**8) }}",
    "{{ ['ab' * 10**7] | map('upper') | map('upper') | join }}{% for i in range(99999) %}{{ 'x' * 10**5 }}{% endfor %}",
])
def test_no_way_to_use_up_time_or_memory(source: str) -> None:
    started = time.process_time()
    with pytest.raises(TemplateError):
        render(source)
    assert time.process_time() - started < 10


def test_long_conversations_are_within_the_budget() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 2000} for i in range(400)]
    for name in ("Qwen-Qwen2.5-7B-Instruct.jinja", "GLM-4.7-Flash.jinja"):
        assert len(render((GOLDEN / name).read_text(), messages)) > 400 * 9000


def test_rendering_twice_gives_the_same() -> None:
    template = ChatTemplate((GOLDEN / "Qwen3-Coder.jinja").read_text())
    case = DATA["cases"]["tool_turns"]
    assert template.render(**case) == template.render(**case)
