"""Show a checkpoint on a web page: translations as they are generated, and attention.

    vanilla-transformer space runs/demo                             # on this machine; in a clone: python -m hub.space
    vanilla-transformer space user/model --push user/space          # publish the page as a Space on the Hub
    vanilla-transformer space runs/demo --static OUTPUT             # directory of a page that translates in the browser
    vanilla-transformer space runs/demo --static OUTPUT --push user/space    # also publish it as a static Space

The files of the page do not import this repository, because a Space does not contain it.
"""

from functools import partial

from vanilla_transformer.shared.command_line import (
    CommandLineParser,
    add_options,
    checkpoint_name,
    exit_on_user_error,
    new_path,
)


def main() -> None:
    parser = CommandLineParser("hub.space", __doc__)
    parser.add_argument(
        "checkpoint", type=checkpoint_name, help="Path to a checkpoint directory, or a repository on the Hub."
    )
    parser.add_argument("--port", type=int, help="Port of the page. Default: the first free port from 7860.")
    parser.add_argument("--push", metavar="USER/SPACE", help="Name of the Space to publish the page as.")
    parser.add_argument(
        "--static", metavar="OUTPUT", type=new_path, help="New directory for a page that runs in the browser."
    )
    add_options(parser, "private", "replace")
    arguments = parser.parse_args()
    from ..commits import resolve_repo_id  # slow imports
    from ..hub_errors import TransportError, hub_error_message, import_with_extra
    from .publishing import push, push_static_page

    formatter = partial(hub_error_message, repo_id=arguments.push or arguments.checkpoint)
    with exit_on_user_error(parser.prog, TransportError, formatter=formatter):
        if out := arguments.static:
            import_with_extra(".space.static_page", "hub.space").create_page(arguments.checkpoint, out)
            print(f"{out} contains the page. To view it, run: python -m http.server --directory {out}")
            if arguments.push:
                print(push_static_page(out, resolve_repo_id(arguments.push), arguments.private, arguments.replace))
        elif arguments.push:
            print(push(arguments.checkpoint, resolve_repo_id(arguments.push), arguments.private, arguments.replace))
        else:
            import_with_extra(".space.app", "hub.space").show(arguments.checkpoint, arguments.port)


if __name__ == "__main__":
    main()
