"""A stand-in for a Kubernetes API server on loopback, for the real kubectl: objects in memory, checked by the
published schemas when they come. No controller runs: a test plays those of JobSet, Jobs and pods.
"""

import json
import re
import threading
import time
import urllib.parse
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

JOB_SET_GROUP = "jobset.x-k8s.io/v1alpha2"
KINDS = {
    "v1": {"secrets": "Secret", "configmaps": "ConfigMap", "pods": "Pod",
           "persistentvolumeclaims": "PersistentVolumeClaim"},
    "batch/v1": {"jobs": "Job"},
    JOB_SET_GROUP: {"jobsets": "JobSet"},
}  # fmt: skip
"""Group and version -> plural -> kind."""
OBJECT = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))/namespaces/(?P<namespace>[^/]+)/(?P<plural>\w+)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)


class Api:
    """The server's state, and its address in `url`."""

    def __init__(self, check_schema):
        self.check_schema = check_schema
        self.objects = {}
        """(plural, namespace, name) -> object."""
        self.logs = {}
        """Pod -> what its container printed."""
        self.without_job_sets = False
        """Whether the cluster lacks JobSet's controller and its kind."""
        self.forbidden = set()
        """Plurals that the user may not create."""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def kubeconfig(self, path, namespace="default"):
        """Writes a kubeconfig whose one context is this server."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "contexts": [
                {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": namespace}}
            ],
            "users": [{"name": "me", "user": {}}],
            "current-context": "here",
        }
        path.write_text(yaml.safe_dump(config))

    def kinds(self, group):
        """Plural -> kind of a group, as this cluster has them."""
        return {} if self.without_job_sets and group == JOB_SET_GROUP else KINDS.get(group, {})

    def named(self, plural):
        """Every object of a kind."""
        return [found for (kind, _, _), found in self.objects.items() if kind == plural]

    def put(self, plural, data, namespace="default"):
        """Keeps an object as it is, as a controller would."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metadata = data["metadata"]
        metadata |= {"namespace": namespace}
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata["creationTimestamp"] = metadata.get("creationTimestamp") or stamp
        self.objects[plural, namespace, metadata["name"]] = data
        return data

    def remove(self, plural, namespace, name):
        """Removes an object and, as the garbage collector does, what it owns."""
        uid = self.objects.pop((plural, namespace, name))["metadata"]["uid"]
        owned = [
            key
            for key, found in self.objects.items()
            if any(owner["uid"] == uid for owner in found["metadata"].get("ownerReferences", []))
        ]
        for key in owned:
            if key in self.objects:
                self.remove(*key)

    def discovery(self, path):
        """What a client asks to know the server's kinds; None for another path."""
        if path == "/version":
            return {"major": "1", "minor": "31", "gitVersion": "v1.31.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        groups = [group for group in ("batch/v1", JOB_SET_GROUP) if self.kinds(group)]
        if path == "/apis":
            listed = []
            for group in groups:
                version = {"groupVersion": group, "version": group.partition("/")[2]}
                name = group.partition("/")[0]
                listed.append({"name": name, "versions": [version], "preferredVersion": version})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        group = path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
        if group in ("v1", *groups):
            verbs = ["create", "delete", "get", "list", "patch"]
            listed = [
                {
                    "name": plural,
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": verbs,
                }
                for plural, kind in self.kinds(group).items()
            ]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": listed}
        return self.openapi(path)

    def openapi(self, path):
        """The little of OpenAPI from which kubectl learns that the server refuses unknown fields itself."""
        addresses = {"v1": "api/v1"} | {group: f"apis/{group}" for group in KINDS if group != "v1"}
        if path == "/openapi/v3":
            return {"paths": {a: {"serverRelativeURL": f"/openapi/v3/{a}"} for a in addresses.values()}}
        for group, address in addresses.items():
            if path != f"/openapi/v3/{address}":
                continue
            paths = {}
            name, _, version = group.rpartition("/")
            for plural, kind in self.kinds(group).items():
                validated = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
                patch = {"parameters": validated, "responses": {}}
                patch["x-kubernetes-group-version-kind"] = {"group": name, "version": version, "kind": kind}
                paths[f"/{address}/namespaces/{{namespace}}/{plural}/{{name}}"] = {"patch": patch}
            return {"openapi": "3.0.0", "info": {"title": "stand-in", "version": "1"}, "paths": paths}
        return None


def _without_nulls(data):
    """An object as a server takes it: a field that is null is one that was left out."""
    if isinstance(data, list):
        return [_without_nulls(value) for value in data]
    if isinstance(data, dict):
        return {key: _without_nulls(value) for key, value in data.items() if value is not None}
    return data


def _handler(api):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def answer(self, data, status=200):
            body = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(data, bytes) else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, status, reason, message):
            told = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason}
            self.answer(told | {"message": message, "code": status}, status)

        def asked(self):
            """The object or the list that the address names, or None after an answer that there is none."""
            self.at = urllib.parse.urlsplit(self.path)
            self.query = dict(urllib.parse.parse_qsl(self.at.query))
            found = OBJECT.fullmatch(self.at.path)
            group = found and (found["core"] or found["group"])
            if not found or found["plural"] not in api.kinds(group):
                self.refuse(404, "NotFound", "the server could not find the requested resource")
                return None
            self.kind, self.group = api.kinds(group)[found["plural"]], group
            return found

        def given(self):
            return yaml.safe_load(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")

        def accepted(self, data, found):
            """The object that was sent, if the schemas and the size of a ConfigMap let it."""
            try:
                api.check_schema(_without_nulls(data))
            except Exception as error:
                return self.refuse(422, "Invalid", str(error).splitlines()[0])
            values = data.get("binaryData", {}).values()
            if sum(len(value) * 3 // 4 for value in values) > 1 << 20:
                return self.refuse(422, "Invalid", "must have at most 1048576 bytes")
            if found["plural"] in api.forbidden:
                named = f'{found["plural"]} "{data["metadata"]["name"]}" is forbidden'
                return self.refuse(403, "Forbidden", f'{named}: User "me" cannot create it')
            if self.query.get("dryRun") == "All":
                return data
            return api.put(found["plural"], data, found["namespace"])

        def do_GET(self):
            path = urllib.parse.urlsplit(self.path).path
            if path == "/openapi/v2":  # an empty message of Protocol Buffers
                return self.answer(b"")
            if known := api.discovery(path):
                return self.answer(known)
            found = self.asked()
            if not found:
                return None
            if found["log"]:
                return self.answer(api.logs.get(found["name"], "").encode())
            if found["name"]:
                data = api.objects.get((found["plural"], found["namespace"], found["name"]))
                if data is None:
                    return self.refuse(404, "NotFound", f'{found["plural"]} "{found["name"]}" not found')
                return self.answer(data)
            items = [
                data
                for (plural, namespace, _), data in api.objects.items()
                if (plural, namespace) == (found["plural"], found["namespace"]) and self.selected(data)
            ]
            return self.answer(
                {"kind": f"{self.kind}List", "apiVersion": self.group, "metadata": {}, "items": items}
            )

        def selected(self, data):
            wanted = [part.split("=") for part in self.query.get("labelSelector", "").split(",") if part]
            labels = data["metadata"].get("labels", {})
            return all(labels.get(key) == value for key, value in wanted)

        def do_POST(self):
            found = self.asked()
            if not found:
                return None
            data = self.given()
            if (found["plural"], found["namespace"], data["metadata"]["name"]) in api.objects:
                return self.refuse(409, "AlreadyExists", f'"{data["metadata"]["name"]}" already exists')
            kept = self.accepted(data, found)
            return self.answer(kept, 201) if kept else None

        def do_PATCH(self):
            found = self.asked()
            if not found:
                return None
            assert self.headers["Content-Type"].startswith("application/apply-patch"), "server-side apply"
            kept = self.accepted(self.given(), found)
            return self.answer(kept) if kept else None

        def do_DELETE(self):
            found = self.asked()
            if not found:
                return None
            self.given()
            key = (found["plural"], found["namespace"], found["name"])
            if key not in api.objects:
                return self.refuse(404, "NotFound", f'{found["plural"]} "{found["name"]}" not found')
            api.remove(*key)
            return self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    return Handler
