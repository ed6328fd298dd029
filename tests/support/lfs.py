"""A small Git LFS server for test origins: batch, objects under the repository's own URL, locks that nobody holds."""

from __future__ import annotations

import json
from typing import Any

from tests.support.origins import Exchange, Handler

MEDIA = "application/vnd.git-lfs+json"


class LfsServer:
    """Answers below `{base}/{repository}.git/info/lfs`. `objects` holds what was uploaded, by its id."""

    def __init__(self, base: str, fallback: Handler, *, token: str = "") -> None:
        """`fallback` answers every other path. `token` goes into the header that each action asks for."""
        self._header = {"header": {"Authorization": f"RemoteAuth {token}"}, "expires_in": 3600} if token else {}
        self._base = base
        self._fallback = fallback
        self.objects: dict[str, bytes] = {}

    async def __call__(self, exchange: Exchange) -> None:
        repository, found, call = exchange.request.path.partition("/info/lfs/")
        if not found:
            await self._fallback(exchange)
            return
        body = await exchange.read_body()
        match (exchange.request.method, call.split("/")):
            case ("POST", ["objects", "batch"]):
                await self._json(exchange, self._batch(repository, json.loads(body)))
            case ("PUT", ["objects", oid]):
                self.objects[oid] = body
                await exchange.answer(200)
            case ("GET", ["objects", oid]) if oid in self.objects:
                await exchange.answer(200, self.objects[oid], (("Content-Type", "application/octet-stream"),))
            case ("POST", ["locks", "verify"]):
                await self._json(exchange, {"ours": [], "theirs": []})
            case _:
                await exchange.answer(404)

    def _batch(self, repository: str, asked: dict[str, Any]) -> dict[str, Any]:
        operation = asked["operation"]
        answers: list[dict[str, Any]] = []
        for wanted in asked["objects"]:
            oid, known = wanted["oid"], wanted["oid"] in self.objects
            action = {operation: {"href": f"{self._base}{repository}/info/lfs/objects/{oid}", **self._header}}
            needed = (operation == "download") == known
            answers.append({**wanted, **({"actions": action} if needed else {})})
        return {"transfer": "basic", "objects": answers, "hash_algo": "sha256"}

    async def _json(self, exchange: Exchange, value: dict[str, Any]) -> None:
        await exchange.answer(200, json.dumps(value).encode(), (("Content-Type", MEDIA),))
