"""A stand-in for the Hugging Face hub on loopback: repositories, commits, and files in LFS."""

import base64
import hashlib
import json
import re

from tests.support.json_server import JsonServer


class Hub(JsonServer):
    """A hub, and all that it was told. token: the one that may write."""

    def __init__(self, token):
        super().__init__()
        self.token = token
        self.repositories = {}  # name -> whether it is private
        self.objects = {}  # of LFS, by SHA-256
        self.files = {}  # of the only branch, by repository and path
        self.unknown = []  # requests that it has no answer for

    def take(self, method, path, headers, body):
        path = path.partition("?")[0]
        if upload := re.fullmatch(r"/objects/(\w+)", path):
            self.objects[upload[1]] = body
            return (200 if hashlib.sha256(body).hexdigest() == upload[1] else 400), {}
        if headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if (method, path) == ("POST", "/api/repos/create"):
            told = json.loads(body)
            name = f"{told.get('organization') or 'me'}/{told['name']}"
            private = told.get("visibility") == "private" or told.get("private") is True
            known = self.repositories.setdefault(name, private) and name in self.files
            return (409 if known else 200), {"url": f"{self.url}/{name}", "id": name, "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            return 200, {"files": [self.mode(file) for file in json.loads(body)["files"]]}
        if path.endswith(".git/info/lfs/objects/batch"):
            told = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": list(map(self.place, told))}
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self.commit(found[1], [json.loads(line) for line in body.splitlines()])
            return 200, {"commitUrl": f"{self.url}/{found[1]}/commit/1", "commitOid": "1"}
        if found := re.fullmatch(r"/api/models/(.+)/tree/main/?", path):
            paths = self.files.get(found[1], {})
            return 200, [{"type": "file", "path": p, "size": 1, "oid": "1"} for p in paths]
        if found := re.fullmatch(r"/api/models/(.+?)(/revision/main)?", path):
            siblings = [{"rfilename": p} for p in self.files.get(found[1], {})]
            return 200, {"id": found[1], "sha": "1", "siblings": siblings}
        self.unknown.append((method, path))
        return 404, {"error": "not found"}

    def mode(self, file):
        large = file["path"].endswith(".safetensors")
        mode = "lfs" if large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def place(self, told):
        href = {"href": f"{self.url}/objects/{told['oid']}"}
        return {**told, "authenticated": True, "actions": {"upload": href}}

    def commit(self, name, lines):
        files = self.files.setdefault(name, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
