"""Volt over HTTP. The generated OpenAPI document, at /openapi.json, is also what validates the requests."""

from __future__ import annotations

import logging
import time

from flask import Flask, Response, g, request
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from volt import errors
from volt.coordinator import Coordinator
from volt.deploymodels import Deployment, DeploymentList, DeploymentRequest
from volt.fields import AGENT_PATTERN, MAX_INTEGER, Name
from volt.models import (
    Assignment,
    BootSet,
    DeadParentReport,
    Health,
    HeartbeatAnswer,
    HeartbeatRequest,
    Host,
    HostList,
    HostRequest,
    Image,
    ImageList,
    ImageTree,
    JoinRequest,
    ProblemDocument,
    PublishRequest,
    summary,
)
from volt.tokens import token_matches

log = logging.getLogger(__name__)

MAX_BODY = 4 * 1024 * 1024
MAX_ROW = 2**31 - 1
"""The largest number of a row that a database knows."""
OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
"""Paths that need no token: they tell nothing about hosts and images."""

HTTP_ERRORS: dict[int | None, str] = {
    404: "there is no such path in Volt's API",
    405: "this path does not take this method",
    413: f"a body may have {MAX_BODY} bytes",
}
"""By the status of Flask's own errors. Flask's texts are for people who typed an address."""

PROBLEM = {
    "description": "A problem (RFC 9457)",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
}


class HostPath(BaseModel):
    """A host in a path."""

    host: Name


class ImagePath(BaseModel):
    """An image in a path."""

    image: Name


class NodePath(HostPath, ImagePath):
    """A host's node of an image in a path."""


class DeploymentPath(BaseModel):
    """A deployment in a path."""

    deployment: int = Field(ge=1, le=MAX_ROW)


class AgentHeader(BaseModel):
    """Which agent sends a request. Calls of a host are refused while another agent's lease on its name runs."""

    agent: str = Field("", alias="Volt-Agent", pattern=AGENT_PATTERN)


class LeaveQuery(BaseModel):
    """How a host leaves. ``dropped``: the host no longer reads by any assignment up to this revision.

    ``needed``: the host may have VMs that need the image.
    """

    dropped: int = Field(-1, ge=-1, le=MAX_INTEGER)
    needed: bool = False


class RemoveQuery(BaseModel):
    """``when_unused``: withdraw the image now; it goes when only its origins have it."""

    when_unused: bool = False


def create_app(coordinator: Coordinator, token: str | None = None) -> Flask:
    """The WSGI application. With a token every path but ``OPEN_PATHS`` needs it."""
    app = OpenAPI(
        "volt",
        info=Info(title="Volt", version="1", description="Hosts, images and attach trees of VirtMan"),
        security_schemes={"token": {"type": "http", "scheme": "bearer"}},
        responses={"default": PROBLEM, "400": PROBLEM},
        openapi_extensions={"security": [{"token": []}, {}]},
        validation_error_status="400",
        validation_error_model=ProblemDocument,
        validation_error_callback=_refuse,
        doc_ui=False,
    )
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.url_map.merge_slashes = False  # a path that is not in the document is an error, not a redirection
    app.register_error_handler(Exception, _answer_error)
    _observe(app, coordinator, token)
    _add_hosts(app, coordinator)
    _add_images(app, coordinator)
    _add_nodes(app, coordinator)
    _add_deployments(app, coordinator)
    _add_operation(app, coordinator)
    return app


def _observe(app: OpenAPI, coordinator: Coordinator, token: str | None) -> None:
    @app.before_request
    def begin() -> None:
        g.begun = time.monotonic()
        sent = request.headers.get("Authorization")
        if token and request.path not in OPEN_PATHS and not token_matches(sent, token):
            raise errors.Unauthorized(
                "send the token: Authorization: Bearer …" if sent is None else "the token is not the one of this Volt"
            )
        if (request.content_length or 0) > MAX_BODY:  # whatever it says it is
            raise RequestEntityTooLarge

    @app.after_request
    def end(response: Response) -> Response:
        took = time.monotonic() - g.begun
        endpoint = str(request.url_rule) if request.url_rule else "none"
        coordinator.metrics.requests.labels(request.method, endpoint, response.status_code).observe(took)
        return response


def _add_hosts(app: OpenAPI, volt: Coordinator) -> None:
    @app.get("/v1/hosts", responses={200: HostList})
    def list_hosts() -> Response:
        """All registered hosts, by name."""
        return _answer(HostList(hosts=volt.hosts()))

    @app.put("/v1/hosts/<host>", responses={200: Host})
    def register_host(path: HostPath, header: AgentHeader, body: HostRequest) -> Response:
        """Register a host or refresh it; its places in the trees stay."""
        return _answer(volt.register(path.host, body.address, body.place, body.methods, agent=header.agent))

    @app.delete("/v1/hosts/<host>", responses={204: None})
    def remove_host(path: HostPath) -> Response:
        """Take a host out of all trees and forget it."""
        volt.remove_host(path.host)
        return Response(status=204)

    @app.post("/v1/hosts/<host>/heartbeat", responses={200: HeartbeatAnswer})
    def heartbeat(path: HostPath, header: AgentHeader, body: HeartbeatRequest) -> Response:
        """Renew the lease, say what the host has, and learn what changed."""
        told = (body.nodes, body.kept, body.needed, body.address, body.place, body.transfers, body.methods)
        return _answer(volt.heartbeat(path.host, *told, agent=header.agent))


def _add_images(app: OpenAPI, volt: Coordinator) -> None:
    @app.get("/v1/images", responses={200: ImageList})
    def list_images() -> Response:
        """All published images, by name."""
        return _answer(ImageList(images=volt.images()))

    @app.post("/v1/images", responses={200: Image, 201: Image})
    def publish_image(header: AgentHeader, body: PublishRequest) -> Response:
        """Publish an image (201); the same again, or from one more origin (200)."""
        image, new = volt.publish(body.name, body.size, body.digest, body.origin, body.parent, agent=header.agent)
        return _answer(image, 201 if new else 200)

    @app.get("/v1/images/<image>", responses={200: Image})
    def show_image(path: ImagePath) -> Response:
        """One image."""
        return _answer(volt.image(path.image))

    @app.delete("/v1/images/<image>", responses={204: None})
    def remove_image(path: ImagePath, query: RemoveQuery) -> Response:
        """Withdraw an image that no host but its origins has; one that others have with `?when_unused=true`."""
        volt.remove_image(path.image, when_unused=query.when_unused)
        return Response(status=204)

    @app.get("/v1/images/<image>/tree", responses={200: ImageTree})
    def show_tree(path: ImagePath) -> Response:
        """The image's tree, nested by primary parent."""
        return _answer(volt.tree(path.image))

    @app.get("/v1/images/<image>/boot-set", responses={200: BootSet})
    def show_boot_set(path: ImagePath) -> Response:
        """What VMs read of the image while they boot; no ranges if no host has told."""
        return _answer(volt.boot_set(path.image))

    @app.put("/v1/images/<image>/boot-set", responses={204: None})
    def add_boot_set(path: ImagePath, body: BootSet) -> Response:
        """Add what VMs of a host have read. Ranges that were known already come first then."""
        volt.add_boot_set(path.image, body.ranges)
        return Response(status=204)


def _add_nodes(app: OpenAPI, volt: Coordinator) -> None:
    @app.post("/v1/images/<image>/nodes", responses={200: Assignment})
    def join_tree(path: ImagePath, header: AgentHeader, body: JoinRequest) -> Response:
        """A place in the image's tree, the same one when asked again, under a new revision."""
        return _answer(volt.join(path.image, body.host, moving=body.moving, agent=header.agent))

    @app.delete("/v1/images/<image>/nodes/<host>", responses={204: None})
    def leave_tree(path: NodePath, header: AgentHeader, query: LeaveQuery) -> Response:
        """Give the place up."""
        volt.leave(path.image, path.host, query.dropped, needed=query.needed, agent=header.agent)
        return Response(status=204)

    @app.post("/v1/images/<image>/reports", responses={200: Assignment})
    def report_dead(path: ImagePath, header: AgentHeader, body: DeadParentReport) -> Response:
        """Say that a parent does not answer; the reporter's assignment from now on."""
        return _answer(volt.report_dead(path.image, body.reporter, body.dead, agent=header.agent))


def _add_deployments(app: OpenAPI, volt: Coordinator) -> None:
    @app.get("/v1/deployments", responses={200: DeploymentList})
    def list_deployments() -> Response:
        """All deployments, the newest first, without their hosts."""
        return _answer(DeploymentList(deployments=volt.deployments.all()))

    @app.post("/v1/deployments", responses={201: Deployment})
    def create_deployment(body: DeploymentRequest) -> Response:
        """Bring a whole image to hosts. Hosts that have it already are done at once."""
        return _answer(volt.deployments.create(body), 201)

    @app.get("/v1/deployments/<int:deployment>", responses={200: Deployment})
    def show_deployment(path: DeploymentPath) -> Response:
        """One deployment, and how far each of its hosts is."""
        return _answer(volt.deployments.one(path.deployment))

    @app.delete("/v1/deployments/<int:deployment>", responses={204: None})
    def cancel_deployment(path: DeploymentPath) -> Response:
        """End a deployment. Hosts that have all of the image keep it."""
        volt.deployments.cancel(path.deployment)
        return Response(status=204)


def _add_operation(app: OpenAPI, volt: Coordinator) -> None:
    @app.get("/healthz", responses={200: Health})
    def health() -> Response:
        """Whether Volt and its store answer."""
        volt.store.check()
        return _answer(Health(status="ok"))

    @app.get("/metrics", doc_ui=False)
    def metrics() -> Response:
        return Response(volt.metrics.text(), mimetype="text/plain; version=0.0.4")

    @app.get("/openapi.json", doc_ui=False)
    def document() -> Response:
        return Response(app.json.dumps(app.api_doc), mimetype="application/json")


def _refuse(error: ValidationError) -> Response:
    if request.method in ("POST", "PUT") and not isinstance(request.get_json(silent=True), dict):
        raise errors.BadRequest("the body must be a JSON object, sent as application/json") from error
    raise errors.BadRequest(summary(error)) from error


def _answer(model: BaseModel, status: int = 200) -> Response:
    return Response(model.model_dump_json(), status=status, mimetype="application/json")


def _answer_error(error: Exception) -> Response:
    problem = _problem_of(error)
    document = ProblemDocument(
        type=problem.type(),
        title=problem.slug.replace("-", " "),
        status=problem.status,
        detail=problem.detail,
        hosts=list(problem.hosts),
    )
    response = Response(document.model_dump_json(), status=problem.status, mimetype="application/problem+json")
    if isinstance(error, MethodNotAllowed):
        response.headers["Allow"] = ", ".join(error.valid_methods or ())
    if isinstance(problem, errors.Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _problem_of(error: Exception) -> errors.Problem:
    match error:
        case errors.Problem():
            return error
        case HTTPException():
            why = HTTP_ERRORS.get(error.code, error.description)
            problem = errors.BadRequest(f"{request.method} {request.path}: {why}")
            problem.status = error.code or problem.status
            return problem
        case RecursionError():
            return errors.BadRequest("the body's JSON is nested too deeply")
        case SQLAlchemyError():
            log.error("the store failed", exc_info=error)
            return errors.StoreDown("the database failed; see Volt's log")
        case _:
            log.error("%s %s failed", request.method, request.path, exc_info=error)
            return errors.InternalError("see Volt's log")
