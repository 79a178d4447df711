"""Configurations of DeerFlow, each for one of its providers of sandboxes."""

MODELS = """
models:
  - {name: dummy, use: "langchain_openai:ChatOpenAI", model: dummy, api_key: x}
"""


def aio_config(url, key, **settings):
    """The provider of AIO sandboxes, which a provisioner makes; the other settings have DeerFlow's names."""
    use = "deerflow.community.aio_sandbox:AioSandboxProvider"
    return provider_config(use, provisioner_url=url, provisioner_api_key=key, **settings)


def opensandbox_config(domain, key):
    """The provider of sandboxes of the OpenSandbox API."""
    return provider_config("deerflow.community.opensandbox:OpenSandboxProvider", domain=domain, protocol="http", api_key=key)


def provider_config(use, **settings):
    lines = [f"  {name}: {value}\n" for name, value in {"use": use, **settings}.items()]
    return MODELS + "sandbox:\n" + "".join(lines)
