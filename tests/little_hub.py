"A server on this machine that answers as the Hugging Face hub does, as far as `datasets` asks when it streams."
import hashlib
import http.server
import io
import json
import re
import threading
import urllib.parse

import pyarrow as pa
import pyarrow.parquet as pq

SHA = "0123456789abcdef0123456789abcdef01234567"


def parquet(**columns):
    "The bytes of a file with these columns, in row groups of 50."
    pq.write_table(pa.table(columns), out := io.BytesIO(), row_group_size=50, compression="none")
    return out.getvalue()


class LittleHub(http.server.ThreadingHTTPServer):
    "Repositories, as a dict of path to bytes each; `commits` says at which commit alone some can be read, GATED stands for one that is closed."
    GATED = "gated"

    def __init__(self, repositories, commits=(), most_reads=10**9):
        self.repositories, self.commits, self.most_reads, self.requests = repositories, dict(commits), most_reads, []
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.thread.join()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args): pass

    def answer(self, status, body=b"", **headers):
        if not isinstance(body, bytes): body, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        self.send_response(status)
        for key, value in headers.items(): self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        if self.command != "HEAD": self.wfile.write(body)

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        found = re.fullmatch(r"(/api)?/datasets/([\w.-]+/[\w.-]+)(?:/(\w+)/([^/]+)(?:/(.*))?)?", path)
        if not found: return self.answer(404)
        api, repo, verb, revision, name = found.groups()
        files, sha = self.server.repositories.get(repo), self.server.commits.get(repo, SHA)
        if files is None: return self.answer(401, X_Error_Code="RepoNotFound")
        if files == LittleHub.GATED: return self.answer(401, X_Error_Code="GatedRepo")
        if revision not in ((sha,) if repo in self.server.commits else (None, "main", sha)): return self.answer(404, X_Error_Code="RevisionNotFound")
        if not api: return self.file(files, name, sha)
        if verb in (None, "revision"): return self.answer(200, dict(id=repo, sha=sha, siblings=[dict(rfilename=f) for f in files], tags=[], private=False))
        if verb == "tree": return self.tree(files, f"{name.rstrip('/')}/" if name else "")
        self.answer(404)

    do_HEAD = do_GET

    def tree(self, files, under):
        here = {f[len(under):].split("/")[0]: f for f in files if f.startswith(under)}
        if not here: return self.answer(404, X_Error_Code="EntryNotFound")
        self.answer(200, [dict(type="file" if under + n == f else "directory", path=under + n, oid="0"*40, size=len(files[f])) for n, f in here.items()])

    def file(self, files, name, sha):
        if name not in files: return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        data = files[name]
        if name.endswith(".parquet") and self.command == "GET":
            self.server.most_reads -= 1
            if self.server.most_reads < 0:
                self.close_connection = True
                return self.connection.close()
        head = dict(X_Repo_Commit=sha, ETag=f'"{hashlib.sha1(data).hexdigest()}"', Accept_Ranges="bytes")
        if not (part := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")): return self.answer(200, data, **head)
        first, last = int(part[1]), min(int(part[2] or len(data)), len(data) - 1)
        self.answer(206, data[first:last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}", **head)
