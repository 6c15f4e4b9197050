"""Which requests can follow which, for the stateful phase of schemathesis.

The answer to one operation names a new workspace, session or run. Every operation that needs it becomes a link of that
answer, and takes what else it needs from the request before.
"""

import re

# For each operation that makes something: the statuses of its answer, and where the values of path parameters are.
MAKERS = {
    "create_workspace": (["200", "201"], {"w": "$response.body#/id"}),
    "create_session": (["201"], {"s": "$response.body#/id"}),
    "send_prompt": (["202"], {"run": "$response.body#/run_id", "s": "$request.body#/session_id"}),
    "start_fleet": (["201"], {"f": "$response.body#/id"}),
    "send_mail": (["202"], {"m": "$response.body#/id"}),
    "create_token": (["201"], {"id": "$response.body#/id"}),
    "make_worker_token": (["201"], {"id": "$response.body#/id"}),
}


def path_parameters(path):
    return set(re.findall(r"{(\w+)}", path))


def add_links(document):
    """Adds the links to the document."""
    operations = {
        operation["operationId"]: (path, operation)
        for path, methods in document["paths"].items()
        for operation in methods.values()
    }
    for name, (statuses, fields) in MAKERS.items():
        path, maker = operations[name]
        known = {parameter: f"$request.path.{parameter}" for parameter in path_parameters(path)}
        known |= fields
        links = {
            target: {"operationId": target, "parameters": {one: known[one] for one in path_parameters(target_path)}}
            for target, (target_path, _) in operations.items()
            if follows(path, fields, target_path, known)
        }
        if name == "create_session":
            prompt = {"session_id": known["s"]}
            parameters = {"w": known["w"]}
            links["send_prompt"] = {"operationId": "send_prompt", "parameters": parameters, "requestBody": prompt}
        for status in statuses:
            maker["responses"][status].setdefault("links", {}).update(links)


def follows(path, fields, target_path, known):
    """Whether the target needs something new, and everything that it needs is known."""
    needed = path_parameters(target_path)
    # Tokens of clients and of workers have parameters of the same name.
    is_same_kind = "id" not in needed or target_path.startswith(path)
    return is_same_kind and needed <= set(known) and bool(needed & set(fields))
