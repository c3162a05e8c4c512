from __future__ import annotations

import pytest

from headrace.errors import InvalidSetting, InvalidUri
from headrace.settings import AzureSettings
from headrace.storage import parse_uri
from headrace.storage.azure_account import clean_sas, read_account
from headrace.storage.azure_location import find_location, is_azure_url

KEY = "a2V5"
SAS = "sv=1&sp=rl&sig=abc%2Bd%3D"
EMULATOR = "http://127.0.0.1:10000/devstoreaccount1"
CLOUD = "https://{}.blob.core.windows.net"


def settings(**given: str) -> AzureSettings:
    return AzureSettings(**given)


@pytest.mark.parametrize(
    ("uri", "given", "url", "container", "prefix"),
    [
        # The first part is the container where an account is configured, whatever names it.
        ("az://models/llama", {"account": "acct"}, CLOUD.format("acct"), "models", "llama"),
        ("az://models/llama/v1", {"account": "acct"}, CLOUD.format("acct"), "models", "llama/v1"),
        ("az://models", {"account": "acct"}, CLOUD.format("acct"), "models", ""),
        ("az://$root/a", {"account": "acct"}, CLOUD.format("acct"), "$root", "a"),
        ("az://models/m", {"endpoint": EMULATOR}, EMULATOR, "models", "m"),
        ("az://models/m", {"endpoint": "https://blobs.example.com"}, "https://blobs.example.com", "models", "m"),
        ("az://models/m", {"connection_string": "UseDevelopmentStorage=true"}, EMULATOR, "models", "m"),
        ("az://models/m", {"connection_string": f"AccountName=acct;AccountKey={KEY}"}, CLOUD.format("acct"), "models", "m"),
        # It is the account where none is configured, and where it is the configured one.
        ("az://acct/models/llama/v1", {}, CLOUD.format("acct"), "models", "llama/v1"),
        ("az://acct/models", {"account_key": KEY}, CLOUD.format("acct"), "models", ""),
        ("az://acct/models/m", {"account": "acct"}, CLOUD.format("acct"), "models", "m"),
        ("az://acct/models/m", {"account": "acct", "endpoint": "http://h:1"}, "http://h:1/acct", "models", "m"),
        # Forms that hold an account are never in doubt.
        ("az://models@other/m", {"account": "acct"}, CLOUD.format("other"), "models", "m"),
        ("az://models@devstoreaccount1/m", {"endpoint": EMULATOR}, EMULATOR, "models", "m"),
        ("abfss://models@acct.dfs.core.windows.net/m/", {}, CLOUD.format("acct"), "models", "m"),
        ("wasbs://models@acct.blob.core.chinacloudapi.cn/m", {}, "https://acct.blob.core.chinacloudapi.cn", "models", "m"),
        ("az://acct.blob.core.windows.net/models/m", {"account": "other"}, CLOUD.format("acct"), "models", "m"),
        ("https://acct.blob.core.windows.net/models/a%20b/", {}, CLOUD.format("acct"), "models", "a b"),
        ("https://acct.dfs.core.windows.net/models/m", {}, CLOUD.format("acct"), "models", "m"),
        ("https://acct-secondary.blob.core.windows.net/models/m", {}, CLOUD.format("acct-secondary"), "models", "m"),
        ("https://acct.z12.blob.storage.azure.net/models", {}, "https://acct.z12.blob.storage.azure.net", "models", ""),
        (f"{EMULATOR}/models/m", {"endpoint": f"{EMULATOR}/"}, EMULATOR, "models", "m"),
        ("https://blobs.example.com/models/m", {"endpoint": "https://blobs.example.com"}, "https://blobs.example.com", "models", "m"),
        # Other clouds.
        ("az://models/m", {"account": "acct", "endpoint_suffix": "core.usgovcloudapi.net"}, "https://acct.blob.core.usgovcloudapi.net", "models", "m"),
        ("az://models/m", {"account": "acct", "endpoint_suffix": ".blob.stack.local"}, "https://acct.blob.stack.local", "models", "m"),
        ("az://c01@acct.blob.stack.local/m", {"endpoint_suffix": "stack.local"}, "https://acct.blob.stack.local", "c01", "m"),
    ],
)  # fmt: skip
def test_where_a_uri_leads(uri: str, given: dict[str, str], url: str, container: str, prefix: str) -> None:
    found = find_location(parse_uri(uri), settings(**given))
    assert (found.url, found.container, found.prefix) == (url, container, prefix)


@pytest.mark.parametrize(
    ("endpoint", "account", "url"),
    [
        ("http://127.0.0.1:10000/devstoreaccount1", "devstoreaccount1", EMULATOR),
        ("http://127.0.0.1:10000/devstoreaccount1/", "devstoreaccount1", EMULATOR),
        ("http://azurite:10000/acct", "acct", "http://azurite:10000/acct"),
        ("http://[::1]:10000/acct", "acct", "http://[::1]:10000/acct"),
        ("HTTPS://Acct.blob.core.windows.net/", "acct", CLOUD.format("acct")),
        ("acct.blob.core.windows.net", "acct", CLOUD.format("acct")),
        ("https://acct.dfs.core.windows.net", "acct", CLOUD.format("acct")),
        ("https://acct.privatelink.blob.core.windows.net", "", "https://acct.privatelink.blob.core.windows.net"),
        ("https://blobs.example.com", "", "https://blobs.example.com"),
    ],
)
def test_an_endpoint_names_its_account(endpoint: str, account: str, url: str) -> None:
    found = read_account(settings(endpoint=endpoint))
    assert (found.name, found.url) == (account, url)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:10000", "http://localhost:10000/", "http://azurite:10000"])
def test_a_host_without_an_account_gets_it_into_its_path(endpoint: str) -> None:
    found = read_account(settings(endpoint=endpoint, account="acct"))
    assert found.url == f"{endpoint.rstrip('/')}/acct"


STRING = f"DefaultEndpointsProtocol=https;AccountName=acct;AccountKey={KEY};EndpointSuffix=core.windows.net"


@pytest.mark.parametrize(
    ("given", "key", "sas", "says"),
    [
        ({"connection_string": STRING, "sas_token": SAS, "account_key": "b3RoZXI="}, KEY, "", "CONNECTION_STRING"),
        ({"connection_string": f"BlobEndpoint={CLOUD.format('acct')}/;SharedAccessSignature={SAS}"}, "", SAS, "CONNECTION"),
        ({"connection_string": f'"{STRING};"'}, KEY, "", "CONNECTION_STRING"),
        ({"connection_string": STRING.replace("AccountKey", "accountkey")}, KEY, "", "CONNECTION_STRING"),
        ({"connection_string": "AccountName=acct", "account_key": KEY}, KEY, "", "AZURE_STORAGE_KEY"),
        ({"account": "acct", "sas_token": SAS, "account_key": KEY}, "", SAS, "SAS_TOKEN"),
        ({"account": "acct", "sas_token": f"?{SAS}"}, "", SAS, "SAS_TOKEN"),
        ({"account": "acct", "account_key": KEY}, KEY, "", "AZURE_STORAGE_KEY"),
        ({"endpoint": f"{CLOUD.format('acct')}?{SAS}"}, "", SAS, "AZURE_STORAGE_ENDPOINT"),
        ({"account": "acct"}, "", "", "default chain"),
        ({}, "", "", "default chain"),
    ],
)  # fmt: skip
def test_one_of_the_credentials_is_chosen(given: dict[str, str], key: str, sas: str, says: str) -> None:
    """In this order: connection string, SAS, key, a token."""
    found = find_location(parse_uri("az://models@acct/m"), settings(**given))
    assert (found.key, found.sas) == (key, sas)
    assert says in found.credentials
    for secret in filter(None, (key, sas)):
        assert secret not in repr(found)
        assert secret not in repr(settings(**given))


def test_a_connection_string_keeps_all_of_a_key() -> None:
    assert read_account(settings(connection_string="AccountName=acct;AccountKey=a+b/c==;")).key == "a+b/c=="


def test_what_belongs_to_one_account_is_not_shown_to_another() -> None:
    given = settings(account="acct", account_key=KEY)
    for uri in ("az://models@other/m", "https://other.blob.core.windows.net/models/m"):
        found = find_location(parse_uri(uri), given)
        assert (found.key, found.sas) == ("", "")
        assert "acct" in found.credentials
    for uri in ("az://models@acct/m", "https://acct.blob.core.windows.net/models/m", "az://models/m"):
        assert find_location(parse_uri(uri), given).key == KEY


def test_a_sas_in_a_url_wins_and_stays_out_of_sight() -> None:
    uri = parse_uri(f"https://acct.blob.core.windows.net/models/m?{SAS}")
    found = find_location(uri, settings(account="acct", account_key=KEY))
    assert (found.key, found.sas) == ("", SAS)
    assert found.prefix == "m"
    assert "abc" not in f"{found!r} {uri!r} {uri}"


@pytest.mark.parametrize("query", ["snapshot=2024", "versionid=1&sig=a", "comp=list&sig=a", "sv=1", "token"])
def test_another_query_is_refused(query: str) -> None:
    with pytest.raises(InvalidUri, match="shared access signature") as caught:
        find_location(parse_uri(f"https://acct.blob.core.windows.net/models/m?{query}"), settings())
    assert query not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("sv=1&sig=a%2Bb%3D", "sv=1&sig=a%2Bb%3D"),
        ("?sv=1&sig=a+b=", "sv=1&sig=a%2Bb%3D"),
        (" '?sig=x' \n", "sig=x"),
        ("sig=x&se=2024-01-01T00:00:00Z", "sig=x&se=2024-01-01T00%3A00%3A00Z"),
        ("sig=x\r\nHost: evil", "sig=x%0D%0AHost%3A%20evil"),
    ],
)
def test_a_sas_is_encoded_once(given: str, cleaned: str) -> None:
    assert clean_sas(given) == cleaned
    assert clean_sas(cleaned) == cleaned


@pytest.mark.parametrize(
    ("uri", "given", "says"),
    [
        ("az://models", {}, "az://models@account"),
        ("az://models", {}, "az://models/container"),
        ("az://acct", {"account": "acct"}, "AZURE_STORAGE_ACCOUNT names"),
        ("az://my.models/llama", {}, "'my.models' is not that of an account"),
        ("az://my-models/llama", {}, "'my-models' is not that of an account"),
        ("az://Models/llama", {"account": "acct"}, "'Models' is not the name of a container"),
        ("az://a/llama", {"account": "acct"}, "'a' is not the name of a container"),
        ("https://acct.blob.core.windows.net", {}, "names no container"),
        ("az://models@acct.blob.evil.example/m", {}, "not one of Azure's"),
        ("az://acct.blob.evil.example/models/m", {"account": "acct"}, "not one of Azure's"),
    ],
)
def test_what_names_no_container_is_refused_with_a_way_out(uri: str, given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidUri) as caught:
        find_location(parse_uri(uri), settings(**given))
    assert says in str(caught.value)
    assert uri in caught.value.what
    assert caught.value.mend


def test_a_reading_is_told_where_there_are_two() -> None:
    one = find_location(parse_uri("az://models/llama/v1"), settings(account="acct")).reading
    assert "container 'models' of the account 'acct', which AZURE_STORAGE_ACCOUNT names" in one
    other = find_location(parse_uri("az://models/llama/v1"), settings()).reading
    assert "container 'llama' of the account 'models'" in other
    assert "with AZURE_STORAGE_ACCOUNT" in other
    assert find_location(parse_uri("az://models@acct/llama"), settings()).reading == ""


@pytest.mark.parametrize(
    "given",
    [
        {"connection_string": "nonsense"},
        {"connection_string": "AccountKey=hunter2=="},
        {"endpoint": "ftp://hunter2.example"},
        {"endpoint": "https://hunter2:hunter2@host"},
        {"endpoint": "https://host\\hunter2"},
        {"sas_token": "hunter2", "account": "acct"},
        {"account": "https://acct.blob.core.windows.net"},
        {"account": "Acct"},
    ],
)
def test_a_useless_configuration_is_told_without_repeating_it(given: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        find_location(parse_uri("az://models/m"), settings(**given))
    assert "AZURE_STORAGE" in str(caught.value) or "signature" in str(caught.value)
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r}"
    assert caught.value.mend


@pytest.mark.parametrize(
    ("uri", "given", "expected"),
    [
        ("https://acct.blob.core.windows.net/a", {}, True),
        ("https://acct.dfs.core.windows.net/a", {}, True),
        ("http://acct.blob.core.windows.net/a", {}, True),
        ("https://onelake.blob.fabric.microsoft.com/a", {}, True),
        ("https://acct.blob.stack.local/a", {"endpoint_suffix": "stack.local"}, True),
        (f"{EMULATOR}/a", {"endpoint": EMULATOR}, True),
        (f"{EMULATOR}/a", {"connection_string": "UseDevelopmentStorage=true"}, True),
        (f"{EMULATOR}/a", {}, False),
        ("http://127.0.0.1:10000/devstoreaccount12/a", {"endpoint": EMULATOR}, False),
        ("https://host/a", {"connection_string": "nonsense"}, False),
        ("https://blob.core.windows.net/a", {}, False),
        ("https://acct.blob.core.windows.net.evil.example/a", {}, False),
        ("https://acct.blob.core.windows.net:8443/a", {}, False),
        ("https://host/acct.blob.core.windows.net", {}, False),
        ("s3://acct.blob.core.windows.net/a", {}, False),
    ],
)  # fmt: skip
def test_urls_of_accounts_are_told_from_others(uri: str, given: dict[str, str], expected: bool) -> None:
    assert is_azure_url(parse_uri(uri), settings(**given)) is expected


def test_variables_have_the_names_that_other_tools_use() -> None:
    for name, variables in {
        "account": ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"),
        "account_key": ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"),
        "connection_string": ("AZURE_STORAGE_CONNECTION_STRING",),
        "sas_token": ("AZURE_STORAGE_SAS_TOKEN",),
        "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT"),
        "endpoint_suffix": ("AZURE_STORAGE_ENDPOINT_SUFFIX",),
    }.items():
        for variable in variables:
            assert AzureSettings.from_environment({variable: " x "}) == AzureSettings(**{name: "x"})
        both = dict.fromkeys(variables, "later") | {variables[0]: "first"}
        assert getattr(AzureSettings.from_environment(both), name) == "first"
    assert AzureSettings.from_environment({"AZURE_STORAGE_KEY": ""}) == AzureSettings()
