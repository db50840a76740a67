"""A Hugging Face Hub on the loopback: what huggingface_hub's client needs to push and to load, over real HTTP.

Storage and CDN addresses use another host name (`localhost`) than the API (`127.0.0.1`), so that redirects cross a
host as they do in the wild, and so that a test can see whether a token left the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.hub.faults import Fault, Faults
from tests.hub.shards import xet_hashes
from tests.hub.store import Blob, Commit, PullRequest, Repo

SIGNATURE = "X-Amz-Signature=5ec2e7f00d5ec2e7f00d&X-Amz-Credential=AKIAPRESIGNED"
_REPO = r"(?P<repo>[\w.\-]+/[\w.\-]+)"


class Refused(Exception):
    """An answer of the Hub that is an error."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


@dataclass(frozen=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def as_json(value: object, **headers: str) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


@dataclass
class Hub:
    """The server and everything it keeps. Use as a context manager; `url` is the endpoint."""

    tokens: dict[str, str] = field(default_factory=lambda: {"hf_" + "t" * 34: "write", "hf_" + "r" * 34: "read"})
    page: int = 1000
    part_bytes: int | None = None
    xet_folder: Path | None = None
    repos: dict[str, Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    log: list[Asked] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)

    def __enter__(self) -> Hub:  # noqa: PYI034 - Self is newer than the oldest Python here
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.elsewhere = f"http://localhost:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def token(self) -> str:
        return next(token for token, role in self.tokens.items() if role == "write")

    def repo(self, name: str, **options: Any) -> Repo:
        return self.repos.setdefault(name, Repo(name, **options))

    def fault(self, on: str, **what: Any) -> None:
        self.faults.add(Fault(on, **what))

    def asked(self, pattern: str) -> list[Asked]:
        return [asked for asked in self.log if re.search(pattern, f"{asked.method} {asked.path}")]

    # -- who may do what

    def role(self, asked: Asked) -> str | None:
        token = asked.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.tokens.get(token)

    def find(self, asked: Asked, name: str, *, write: bool = False) -> Repo:
        role, repo = self.role(asked), self.repos.get(name)
        if repo is None or (repo.private and role is None):
            raise Refused(404 if role else 401, "Repository not found", code="RepoNotFound")
        if write and role != "write":
            raise Refused(403 if role else 401, "You don't have the rights to write to this repository")
        return repo

    def commit_of(self, repo: Repo, revision: str) -> Commit:
        commit = repo.resolve(unquote(revision))
        if commit is None:
            raise Refused(404, f"Invalid rev id: {unquote(revision)}", code="RevisionNotFound")
        return commit

    # -- the API

    def answer(self, asked: Asked) -> Answer:
        for method, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, asked.path)
            if match and method == asked.method:
                return handle(self, asked, **match.groupdict())
        raise Refused(404, f"no such route: {asked.method} {asked.path}")

    def whoami(self, asked: Asked) -> Answer:
        return as_json({"type": "user", "name": "me", "orgs": [], "auth": {"accessToken": {"role": self.role(asked)}}})

    def exchange(self, asked: Asked) -> Answer:
        """Keyless CI: an id token of the CI's provider becomes a short-lived token for one repository."""
        wish = asked.json()
        if wish["subject_token"] != "an-id-token" or not wish["resource"]:
            raise Refused(401, "invalid_grant")
        self.tokens["hf_jwt_" + "o" * 30] = "write"
        return as_json({"access_token": "hf_jwt_" + "o" * 30, "token_type": "bearer", "expires_in": 3600})

    def validate_yaml(self, asked: Asked) -> Answer:
        block = re.match(r"\s*---\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", asked.json()["content"], re.DOTALL)
        data = yaml.safe_load(block[1]) if block else {}
        bases = data.get("base_model") or []
        for named in [bases] if isinstance(bases, str) else bases:
            if not re.fullmatch(_REPO, named):
                errors = [{"message": f'"base_model" with value "{named}" is not valid. Use a model id'}]
                return Answer(400, json.dumps({"errors": errors, "warnings": []}).encode())
        warnings = [] if data else [{"message": "empty or missing yaml metadata in repo card"}]
        return as_json({"errors": [], "warnings": warnings})

    def create_repo(self, asked: Asked) -> Answer:
        if self.role(asked) != "write":
            raise Refused(403 if self.role(asked) else 401, "You don't have the rights to create a model")
        wish = asked.json()
        name = f"{wish.get('organization') or 'me'}/{wish['name']}"
        if name in self.repos:
            raise Refused(409, "You already created this model repo")
        private = wish.get("private") or wish.get("visibility") == "private"
        self.repos[name] = Repo(name, private=bool(private))
        return as_json({"url": f"{self.url}/{name}", "name": name})

    def info(self, asked: Asked, repo: str, revision: str = "main") -> Answer:
        found = self.find(asked, repo)
        commit = self.commit_of(found, revision)
        return as_json(
            {
                "_id": "0",
                "id": repo,
                "modelId": repo,
                "sha": commit.oid,
                "private": found.private,
                "gated": "manual" if found.gated else False,
                "tags": [],
                "cardData": found.card or None,
                "siblings": [{"rfilename": name} for name in commit.tree],
            }
        )

    def tree(self, asked: Asked, repo: str, revision: str) -> Answer:
        commit = self.commit_of(self.find(asked, repo), revision)
        start = int(asked.query.get("cursor", ["0"])[0])
        names = sorted(commit.tree)
        entries = []
        for name in names[start : start + self.page]:
            blob = commit.tree[name]
            entry = {"type": "file", "path": name, "size": blob.size, "oid": blob.oid}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 130}
            entries.append(entry)
        if start + self.page >= len(names):
            return as_json(entries)
        return as_json(entries, Link=f'<{self.url}{asked.path}?recursive=True&cursor={start + self.page}>; rel="next"')

    def refs(self, asked: Asked, repo: str) -> Answer:
        found = self.find(asked, repo)

        def listed(prefix: str, refs: dict[str, str]) -> list[dict[str, str]]:
            return [{"name": name, "ref": f"{prefix}{name}", "targetCommit": oid} for name, oid in refs.items()]

        pulls = [
            {"name": str(num), "ref": f"refs/pr/{num}", "targetCommit": pull.oid} for num, pull in found.pulls.items()
        ]
        branches, tags = listed("refs/heads/", found.branches), listed("refs/tags/", found.tags)
        return as_json({"branches": branches, "tags": tags, "converts": [], "pullRequests": pulls})

    def discussions(self, asked: Asked, repo: str) -> Answer:
        pulls = [pull for pull in self.find(asked, repo).pulls.values() if pull.status == "open"]
        listed = [
            {
                "num": pull.num,
                "title": pull.title,
                "status": pull.status,
                "isPullRequest": True,
                "author": {"name": "me"},
                "createdAt": "2026-11-21T00:00:00.000Z",
                "repo": {"name": repo, "type": "model"},
            }
            for pull in pulls
        ]
        return as_json({"discussions": listed, "count": len(listed), "start": 0})

    def branch(self, asked: Asked, repo: str, name: str) -> Answer:
        found = self.find(asked, repo, write=True)
        start = asked.json().get("startingPoint")
        found.branches[unquote(name)] = self.commit_of(found, start or "main").oid
        return as_json({})

    def tag(self, asked: Asked, repo: str, revision: str) -> Answer:
        found = self.find(asked, repo, write=True)
        name = asked.json()["tag"]
        if name in found.tags:
            raise Refused(409, f"Tag reference exists already: {name}")
        found.tags[name] = self.commit_of(found, revision).oid
        return as_json({})

    # -- files on their way in

    def preupload(self, asked: Asked, repo: str, revision: str) -> Answer:
        found = self.find(asked, repo, write="create_pr" not in asked.query)
        tree = self.commit_of(found, revision).tree
        ignored = tree[".gitignore"].content.decode().split() if ".gitignore" in tree else []
        files = []
        for file in asked.json()["files"]:
            lfs = file["path"].endswith((".safetensors", ".bin", ".model")) or file["size"] > 10 << 20
            old = tree.get(file["path"])
            oid = None if old is None else old.sha256 if old.lfs else old.oid
            mode = "lfs" if lfs else "regular"
            entry = {"path": file["path"], "uploadMode": mode, "shouldIgnore": file["path"] in ignored}
            files.append({**entry, "oid": oid} if oid else entry)
        return as_json({"files": files})

    def batch(self, asked: Asked, repo: str) -> Answer:
        self.find(asked, repo)
        objects = []
        for wanted in asked.json()["objects"]:
            entry: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.stored:
                entry["actions"] = {
                    "upload": self._upload(repo, wanted["oid"], wanted["size"]),
                    "verify": {"href": f"{self.url}/{repo}.git/info/lfs/verify"},
                }
            objects.append(entry)
        return as_json({"transfer": "basic", "objects": objects})

    def _upload(self, repo: str, oid: str, size: int) -> dict[str, Any]:
        if self.part_bytes is None or size <= self.part_bytes:
            return {"href": f"{self.elsewhere}/storage/{oid}?{SIGNATURE}"}
        parts = -(-size // self.part_bytes)
        header = {str(at): f"{self.elsewhere}/storage/{oid}/{at}?{SIGNATURE}" for at in range(1, parts + 1)}
        completion = f"{self.url}/api/complete_multipart?oid={oid}&repo={repo}&{SIGNATURE}"
        return {"href": completion, "header": {**header, "chunk_size": str(self.part_bytes)}}

    def put(self, asked: Asked, oid: str, part: str | None = None) -> Answer:
        assert "authorization" not in asked.headers, "a token left the Hub"
        assert asked.headers["host"].startswith("localhost")
        self.stored[oid if part is None else f"{oid}/{part}"] = asked.body
        return Answer(200, b"", {"ETag": f'"{hashlib.md5(asked.body).hexdigest()}"'})

    def complete(self, asked: Asked) -> Answer:
        wish = asked.json()
        parts = [self.stored.pop(f"{wish['oid']}/{part['partNumber']}") for part in wish["parts"]]
        self.stored[wish["oid"]] = b"".join(parts)
        return as_json({"success": True})

    def verify(self, asked: Asked, repo: str) -> Answer:
        self.find(asked, repo)
        oid = asked.json()["oid"]
        if oid not in self.stored or len(self.stored[oid]) != asked.json()["size"]:
            raise Refused(404, "Object does not exist on the server")
        return as_json({})

    def commit(self, asked: Asked, repo: str, revision: str) -> Answer:
        as_pull = "create_pr" in asked.query
        found = self.find(asked, repo, write=not as_pull)
        lines = [json.loads(line) for line in asked.body.splitlines()]
        header = lines[0]["value"]
        parent = self.commit_of(found, revision)
        if header.get("parentCommit") and header["parentCommit"] != parent.oid:
            if not as_pull:
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
            parent = self.commit_of(found, header["parentCommit"])
        tree = dict(parent.tree)
        for line in lines[1:]:
            self._apply(tree, line["key"], line["value"])
        commit = found.add_commit(parent.oid, header["summary"], tree)
        answer = {"success": True, "commitOid": commit.oid, "commitUrl": f"{self.url}/{repo}/commit/{commit.oid}"}
        if as_pull:
            num = len(found.pulls) + 1
            found.pulls[num] = PullRequest(num, header["summary"], commit.oid)
            return as_json({**answer, "pullRequestUrl": f"{self.url}/{repo}/discussions/{num}"})
        if unquote(revision) in found.branches:
            found.branches[unquote(revision)] = commit.oid
        else:
            found.pulls[int(unquote(revision).rpartition("/")[2])].oid = commit.oid
        return as_json(answer)

    def _apply(self, tree: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        if key == "file":
            tree[value["path"]] = Blob(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            tree[value["path"]] = self._stored_blob(value["oid"], value["size"])
        else:
            assert key == "deletedFile"
            del tree[value["path"]]

    def _stored_blob(self, oid: str, size: int) -> Blob:
        """Return the blob that was uploaded. Its sha256 is what the client says: so does the Hub's tree."""
        if oid in self.stored:
            return Blob(self.stored[oid], lfs=True, claimed=oid)
        known = xet_hashes(self.xet_folder) if self.xet_folder else {}
        if oid not in known:
            raise Refused(400, "Your push was rejected because an LFS pointer pointed to a file that does not exist")
        return Blob(b"", lfs=True, claimed=oid, size_=size, xet_hash=known[oid])

    def xet_token(self, asked: Asked, repo: str, kind: str, revision: str) -> Answer:
        self.find(asked, repo, write=kind == "write" and "create_pr" not in asked.query)
        del revision
        if self.xet_folder is None:
            raise Refused(404, "no xet here")
        headers = {
            "X-Xet-Cas-Url": f"local://{self.xet_folder}",
            "X-Xet-Access-Token": "xet_secret_token_0123456789abcdef",
            "X-Xet-Token-Expiration": str(int(time.time()) + 3600),
        }
        body = {"casUrl": headers["X-Xet-Cas-Url"], "accessToken": headers["X-Xet-Access-Token"]}
        return as_json({**body, "exp": int(headers["X-Xet-Token-Expiration"])}, **headers)

    # -- files on their way out

    def resolve(self, asked: Asked, repo: str, revision: str, path: str) -> Answer:
        commit = self.commit_of(self.find(asked, repo), revision)
        blob = commit.tree.get(unquote(path))
        if blob is None:
            raise Refused(404, "Entry not found", code="EntryNotFound")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.sha256 if blob.lfs else blob.oid}"'}
        if not blob.lfs:
            return Answer(200, blob.content, headers)
        headers |= {"X-Linked-Size": str(blob.size), "X-Linked-Etag": f'"{blob.sha256}"'}
        if blob.xet_hash:
            route = f"{self.url}/api/models/{repo}/xet-read-token/{commit.oid}"
            headers |= {"X-Xet-Hash": blob.xet_hash, "Link": f'<{route}>; rel="xet-auth"'}
        return Answer(302, b"", {**headers, "Location": f"{self.elsewhere}/cdn/{blob.sha256}?{SIGNATURE}"})

    def cdn(self, asked: Asked, oid: str) -> Answer:
        assert "authorization" not in asked.headers, "a token left the Hub"
        return Answer(200, self.stored[oid], {"ETag": f'"{oid}"'})


ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", r"/api/whoami-v2", Hub.whoami),
    ("POST", r"/oauth/token", Hub.exchange),
    ("POST", r"/api/validate-yaml", Hub.validate_yaml),
    ("POST", r"/api/repos/create", Hub.create_repo),
    ("GET", rf"/api/models/{_REPO}", Hub.info),
    ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>[^/]+)", Hub.info),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)", Hub.tree),
    ("GET", rf"/api/models/{_REPO}/refs", Hub.refs),
    ("GET", rf"/api/models/{_REPO}/discussions", Hub.discussions),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<name>[^/]+)", Hub.branch),
    ("POST", rf"/api/models/{_REPO}/tag/(?P<revision>[^/]+)", Hub.tag),
    ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", Hub.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", Hub.commit),
    ("GET", rf"/api/models/{_REPO}/xet-(?P<kind>read|write)-token/(?P<revision>[^/]+)", Hub.xet_token),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", Hub.batch),
    ("POST", rf"/{_REPO}\.git/info/lfs/verify", Hub.verify),
    ("POST", r"/api/complete_multipart", Hub.complete),
    ("PUT", r"/storage/(?P<oid>[0-9a-f]{64})(?:/(?P<part>\d+))?", Hub.put),
    ("GET", r"/cdn/(?P<oid>[0-9a-f]{64})", Hub.cdn),
    ("HEAD", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Hub.resolve),
    ("GET", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Hub.resolve),
]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        split = urlsplit(self.path)
        fault = self.hub.faults.next(self.command, split.path)
        if fault is not None and fault.drop == "before":
            self._hang_up()
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length // 2 if fault is not None and fault.drop == "body" else length)
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, split.path, parse_qs(split.query), headers, body)
        self.hub.log.append(asked)
        if fault is not None and fault.drop == "body":
            self._hang_up()
            return
        if fault is not None:
            threading.Event().wait(fault.delay)  # not time.sleep, which tests make instant
            if fault.action is not None:
                fault.action()
            if fault.corrupt is not None:
                asked = Asked(asked.method, asked.path, asked.query, headers, fault.corrupt(body))
        if fault is not None and fault.status is not None:
            answer = Answer(fault.status, fault.body, {"Content-Type": "application/json", **fault.headers})
        else:
            try:
                answer = self.hub.answer(asked)
            except Refused as error:
                answer = Answer(error.status, json.dumps({"error": str(error)}).encode(), error.headers)
        if fault is not None and fault.drop == "after":
            self._hang_up()
            return
        self._send(answer)

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _serve  # noqa: N815 - the names http.server calls

    def _send(self, answer: Answer) -> None:
        try:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)
        except OSError:  # the client has left
            self.close_connection = True

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's signature
        """Say nothing."""
