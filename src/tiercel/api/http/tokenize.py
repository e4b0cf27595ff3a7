"""/tokenize, /detokenize and /tokenizer_info: the model's own cut of texts and chats, and back."""

from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tiercel.api.http.prompts import check_counts, encode_any, render_chat, with_one_bos
from tiercel.api.http.reading import read
from tiercel.api.http.responses import json_response
from tiercel.api.http.schema import DetokenizeRequest, TokenizeRequest
from tiercel.api.http.service import Service
from tiercel.api.http.tools import check_tools
from tiercel.base.errors import RequestError
from tiercel.text.tokenizer import Tokenizer

_N_SHOWN: Final = 5
_N_DIGITS: Final = 20


async def tokenize(request: Request, service: Service) -> Response:
    """Cut a text, or a chat as the model would see it."""
    ask = await read(request, service, TokenizeRequest)
    service.check_model(ask.model)
    token_ids, strings = await service.in_thread(_tokenize, service, ask)
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": service.engine.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


async def detokenize(request: Request, service: Service) -> Response:
    """Give the text of token ids, special ones included."""
    ask = await read(request, service, DetokenizeRequest)
    service.check_model(ask.model)
    return json_response({"prompt": await service.in_thread(_detokenize, service, ask.tokens)})


async def tokenizer_info(request: Request, service: Service) -> Response:
    """Describe the tokenizer in the words of tokenizer_config.json; served when the server was told to."""
    del request
    if not service.settings.has_tokenizer_info:
        raise HTTPException(404, "route: it is off; start the server with --enable-tokenizer-info-endpoint")
    return json_response(await service.in_thread(_info, service.tokenizer, service.engine.max_model_len))


def _info(tokenizer: Tokenizer, max_model_len: int) -> dict[str, Any]:
    def text(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_text(token_id)

    special = sorted(tokenizer.special_ids)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": text(tokenizer.bos_id),
        "eos_token": text(tokenizer.eos_ids[0] if tokenizer.eos_ids else None),
        "pad_token": text(tokenizer.pad_id),
        "add_bos_token": tokenizer.add_bos,
        "added_tokens_decoder": {str(i): {"content": text(i), "special": True} for i in special},
        "chat_template": tokenizer.chat_template or dict(tokenizer.chat_templates) or None,
    }


def _tokenize(service: Service, ask: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    if (ask.prompt is None) == (ask.messages is None):
        raise RequestError("prompt: one of prompt and messages is needed; send one", param="prompt")
    if ask.tools is not None:
        check_tools(ask.tools, service.settings)
    if ask.messages is not None:
        check_counts([message.get("content") for message in ask.messages], service.settings)
        text = render_chat(service, ask, ask.messages)
    else:
        assert ask.prompt is not None
        text = ask.prompt
    special = ask.messages is None if ask.add_special_tokens is None else ask.add_special_tokens
    token_ids = encode_any(service, text, add_special_tokens=special)
    if ask.messages is not None and special:
        token_ids = with_one_bos(service, token_ids)
    return token_ids, [service.tokenizer.token_text(i) for i in token_ids] if ask.return_token_strs else None


def _detokenize(service: Service, token_ids: list[int]) -> str:
    vocab_size, n_max = service.engine.vocab_size, service.settings.n_detokenize_max
    if len(token_ids) > n_max:
        raise RequestError(
            f"tokens: got {len(token_ids)}; at most {n_max} are read at once; send fewer", param="tokens"
        )
    bad = [i for i in token_ids if not 0 <= i < vocab_size]
    if bad:
        shown = ", ".join(str(i) if len(str(i)) <= _N_DIGITS else f"{str(i)[:_N_DIGITS]}..." for i in bad[:_N_SHOWN])
        raise RequestError(f"tokens: got {shown}; ids from 0 to {vocab_size - 1} are needed", param="tokens")
    return service.tokenizer.decode(token_ids, skip_special_tokens=False)
