"""Show a checkpoint on a web page: translations as they are generated, and attention.

    vanilla-transformer space runs/demo                             # on this machine; in a clone: python -m hub.space
    vanilla-transformer space user/model --push user/space          # publish the page as a Space on the Hub
    vanilla-transformer space runs/demo --static OUTPUT             # directory of a page that translates in the browser
    vanilla-transformer space runs/demo --static OUTPUT --push user/space    # also publish it as a static Space

The files of the page do not import this repository, because a Space does not contain it.
"""

from dataclasses import fields
from functools import partial

from vanilla_transformer.shared.command_line import CommandLineParser, checkpoint_name, new_path, option_name

from ..publishing import UploadSettings


def main() -> None:
    parser = CommandLineParser("hub.space", __doc__)
    checkpoint_help = "Path to a checkpoint directory, or a repository on the Hub."
    parser.add_argument("checkpoint", type=checkpoint_name, help=checkpoint_help)
    parser.add_argument("--port", type=int, help="Port of the page. Default: the first free port from 7860.")
    parser.add_argument("--push", metavar="USER/SPACE", help="Name of the Space to publish the page as.")
    static_help = "New directory for a page that runs in the browser."
    parser.add_argument("--static", metavar="OUTPUT", type=new_path, help=static_help)
    parser.add_settings(UploadSettings)
    options = parser.parse_options()
    if unused := [each.name for each in fields(UploadSettings) if options[each.name] and not options["push"]]:
        parser.error(f"{option_name(unused[0])} requires --push.")
    if options["port"] is not None and (options["push"] or options["static"]):
        parser.error("--port requires a page on this machine. Remove --port, or --push and --static.")
    from ..commits import resolve_repo_id  # slow imports
    from ..hub_errors import TransportError, hub_error_message, import_with_extra
    from .publishing import push, push_static_page

    checkpoint, port, repo_id, out = (options.pop(name) for name in ("checkpoint", "port", "push", "static"))
    with parser.exit_on_user_error(TransportError, formatter=partial(hub_error_message, repo_id=repo_id or checkpoint)):
        repo_id = resolve_repo_id(repo_id) if repo_id else None
        if out:
            import_with_extra(".space.static_page", "hub.space").create_page(checkpoint, out)
        elif not repo_id:
            import_with_extra(".space.app", "hub.space").show(checkpoint, port)
            return
        publish = partial(push_static_page, out) if out else partial(push, checkpoint)
        url = publish(repo_id, **options) if repo_id else None
        usage = f"{out} contains the page. To view it, run: python -m http.server --directory {out}"
        parser.print_result({"folder": out, "url": url}, "\n".join(filter(None, [out and usage, url])))


if __name__ == "__main__":
    main()
