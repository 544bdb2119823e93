"""Publish the paper's beam search as a separate repository on the Hub, for any vanilla_transformer model.

    python -m hub.decoding OUTPUT                          # write the repository
    python -m hub.decoding OUTPUT --push user/name         # also upload it

Without this package: `model.generate(**batch, custom_generate="user/name", trust_remote_code=True, num_beams=4)`.
The code is not part of model repositories: transformers would then use it in every call of `generate()`.
"""

from functools import partial

from vanilla_transformer.shared.command_line import CommandLineParser, new_path

from .publishing import UploadSettings


def main() -> None:
    parser = CommandLineParser("hub.decoding", __doc__)
    parser.add_argument("output", type=new_path, help="Path of the new directory.")
    parser.add_argument("--push", metavar="USER/NAME", help="Name of the repository to upload to.")
    parser.add_settings(UploadSettings)
    options = parser.parse_options()
    from .commits import resolve_repo_id  # slow imports
    from .hub_errors import TransportError, hub_error_message
    from .publishing.decoding_code import push, write

    output, repo_id = options.pop("output"), options.pop("push")
    formatter = partial(hub_error_message, repo_id=repo_id or str(output))
    with parser.exit_on_user_error(TransportError, formatter=formatter):
        name = resolve_repo_id(repo_id) if repo_id else output.name
        write(output, name)
        url = push(output, name, **options) if repo_id else None
        usage = f"{output}: model.generate(custom_generate={str(output)!r}, trust_remote_code=True)"
        parser.print_result({"folder": output, "url": url}, f"{url}\n{usage}" if url else usage)


if __name__ == "__main__":
    main()
