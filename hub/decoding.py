"""Publish the paper's beam search as a separate repository on the Hub, for any vanilla_transformer model.

    python -m hub.decoding OUTPUT                          # write the repository
    python -m hub.decoding OUTPUT --push user/name         # also upload it

Without this package: `model.generate(**batch, custom_generate="user/name", trust_remote_code=True, num_beams=4)`.
The code is not part of model repositories: transformers would then use it in every call of `generate()`.
"""

from functools import partial

from vanilla_transformer.shared.command_line import CommandLineParser, add_options, exit_on_user_error, new_path


def main() -> None:
    parser = CommandLineParser("hub.decoding", __doc__)
    parser.add_argument("output", type=new_path, help="Path of the new directory.")
    parser.add_argument("--push", metavar="USER/NAME", help="Name of the repository to upload to.")
    add_options(parser, "private", "replace")
    arguments = parser.parse_args()
    from .commits import resolve_repo_id  # slow imports
    from .hub_errors import TransportError, hub_error_message
    from .publishing.decoding_code import push, write

    output = arguments.output
    formatter = partial(hub_error_message, repo_id=arguments.push or str(output))
    with exit_on_user_error(parser.prog, TransportError, formatter=formatter):
        name = resolve_repo_id(arguments.push) if arguments.push else output.name
        write(output, name)
        if arguments.push:
            print(push(output, name, arguments.private, arguments.replace))
        print(f"{output}: model.generate(custom_generate={str(output)!r}, trust_remote_code=True)")


if __name__ == "__main__":
    main()
