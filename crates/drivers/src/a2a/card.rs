//! An agent's card: where it is called, in which version and binding, what it can do, and which credential it wants.
//! Cards of 1.0 and 0.3 have different shapes; an agent may put both into one.

use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use qd_catalog::REMOTE_TOKEN;
use serde_json::Value;

use super::address::A2aAddress;
use super::http::A2aCredential;

/// The wire format that an agent speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum A2aVersion {
    /// 0.3 and 0.2.
    V0_3,
    /// 1.0 and later versions compatible with it.
    V1_0,
}

impl A2aVersion {
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.trim().split('.');
        match (numbers.next()?, numbers.next()) {
            ("1", _) => Some(Self::V1_0),
            ("0", Some("2" | "3")) => Some(Self::V0_3),
            _ => None,
        }
    }

    /// The name of the version in a request header.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::V0_3 => "0.3",
            Self::V1_0 => "1.0",
        }
    }
}

/// How calls are mapped to HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum A2aBinding {
    /// All calls at one address, told apart by method.
    JsonRpc,
    /// Each call at its own path.
    Rest,
}

/// The interface that an agent is called by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct A2aInterface {
    pub(super) address: A2aAddress,
    pub(super) binding: A2aBinding,
    pub(super) version: A2aVersion,
    /// The tenant, for servers that host agents of several tenants.
    pub(super) tenant: Option<String>,
}

/// The parts of a card that the driver needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct A2aAgentCard {
    pub(super) interface: A2aInterface,
    /// Whether the agent streams events while it works.
    pub(super) streams: bool,
    /// The header for the credential.
    credential_header: HeaderName,
}

impl A2aAgentCard {
    /// Parses a card that was found at the address `at`. Fails with the reason if the agent cannot be driven.
    pub(super) fn parse(card: &Value, at: &A2aAddress) -> Result<Self, String> {
        if !card.is_object() {
            return Err("it is not a JSON object".to_owned());
        }
        let capabilities = &card["capabilities"];
        if let Some(extension) =
            array_items(&capabilities["extensions"]).iter().find(|extension| extension["required"] == true)
        {
            let uri = extension["uri"].as_str().unwrap_or("without a URI");
            return Err(format!(
                "the agent requires the extension {uri}, which quarterdeck does not support"
            ));
        }
        let offers = interface_offers(card);
        let usable = offers.iter().filter_map(|offer| Some((offer.usable()?, offer)));
        let Some(((_, binding, version), offer)) = usable.min_by_key(|((rank, ..), _)| *rank) else {
            let named: Vec<String> = offers.iter().map(A2aInterfaceOffer::to_string).collect();
            let named = if named.is_empty() { "nothing".to_owned() } else { named.join(", ") };
            return Err(format!(
                "it offers {named}; quarterdeck speaks JSONRPC 1.0 and 0.3, and HTTP+JSON 1.0"
            ));
        };
        let interface = A2aInterface {
            address: at.join(&offer.url)?,
            binding,
            version,
            tenant: offer.tenant.clone().filter(|tenant| !tenant.is_empty()),
        };
        Ok(Self {
            interface,
            streams: capabilities["streaming"] == true,
            credential_header: find_credential_header(card),
        })
    }

    /// The credential made of the session's token.
    pub(super) fn credential(&self, token: &str) -> Result<A2aCredential, String> {
        make_credential(self.credential_header.clone(), token)
    }

    /// The name of the header for the credential.
    pub(super) fn credential_header(&self) -> &str {
        self.credential_header.as_str()
    }
}

/// The credential in the usual header, used before a card says otherwise.
pub(super) fn bearer_credential(token: &str) -> Result<A2aCredential, String> {
    make_credential(AUTHORIZATION, token)
}

fn make_credential(header: HeaderName, token: &str) -> Result<A2aCredential, String> {
    let token = token.trim();
    let text = if header == AUTHORIZATION { format!("Bearer {token}") } else { token.to_owned() };
    let mut value = HeaderValue::from_str(&text).map_err(|_| {
        format!("the value of {REMOTE_TOKEN} has characters that are not allowed in a header")
    })?;
    value.set_sensitive(true);
    Ok(A2aCredential { header, value })
}

/// An interface that a card offers.
#[derive(Debug)]
struct A2aInterfaceOffer {
    url: String,
    binding: String,
    version: String,
    tenant: Option<String>,
}

impl A2aInterfaceOffer {
    /// Rank, binding and version of the interface, where a lower rank is better. `None` if it cannot be used.
    fn usable(&self) -> Option<(u8, A2aBinding, A2aVersion)> {
        let version = A2aVersion::parse(&self.version)?;
        let is_binding = |name: &str| self.binding.eq_ignore_ascii_case(name);
        match version {
            A2aVersion::V1_0 if is_binding("JSONRPC") => Some((0, A2aBinding::JsonRpc, version)),
            A2aVersion::V1_0 if is_binding("HTTP+JSON") => Some((1, A2aBinding::Rest, version)),
            A2aVersion::V0_3 if is_binding("JSONRPC") => Some((2, A2aBinding::JsonRpc, version)),
            _ => None,
        }
    }
}

impl std::fmt::Display for A2aInterfaceOffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.binding, self.version)
    }
}

/// All interfaces that a card offers, in its order.
fn interface_offers(card: &Value) -> Vec<A2aInterfaceOffer> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut offers = Vec::new();
    for interface in array_items(&card["supportedInterfaces"]) {
        let Some(url) = text(&interface["url"]) else { continue };
        offers.push(A2aInterfaceOffer {
            url,
            binding: text(&interface["protocolBinding"]).unwrap_or_else(|| "JSONRPC".to_owned()),
            version: text(&interface["protocolVersion"]).unwrap_or_else(|| "1.0".to_owned()),
            tenant: text(&interface["tenant"]),
        });
    }
    // The older shape: one interface at the top, others in a list of their own, and one version for all.
    let version = text(&card["protocolVersion"]).unwrap_or_else(|| "0.3".to_owned());
    let preferred = text(&card["url"]).map(|url| (url, text(&card["preferredTransport"])));
    let others = array_items(&card["additionalInterfaces"])
        .iter()
        .filter_map(|interface| Some((text(&interface["url"])?, text(&interface["transport"]))));
    for (url, binding) in preferred.into_iter().chain(others) {
        let binding = binding.unwrap_or_else(|| "JSONRPC".to_owned());
        offers.push(A2aInterfaceOffer { url, binding, version: version.clone(), tenant: None });
    }
    offers
}

/// The header that a card wants the credential in: an API key's header if the card accepts nothing in the usual one.
fn find_credential_header(card: &Value) -> HeaderName {
    let Some(schemes) = card["securitySchemes"].as_object() else { return AUTHORIZATION };
    // The names of required schemes. If none is required, any scheme will do.
    let required: Vec<&str> = array_items(&card["securityRequirements"])
        .iter()
        .filter_map(|requirement| requirement["schemes"].as_object())
        .chain(array_items(&card["security"]).iter().filter_map(Value::as_object))
        .flat_map(|requirement| requirement.keys().map(String::as_str))
        .collect();
    let accepted =
        schemes.iter().filter(|(name, _)| required.is_empty() || required.contains(&name.as_str()));
    let mut key_header = None;
    for (_, scheme) in accepted {
        let api_key = &scheme["apiKeySecurityScheme"];
        let (location, name) = match api_key.is_object() {
            true => (&api_key["location"], &api_key["name"]),
            false if scheme["type"] == "apiKey" => (&scheme["in"], &scheme["name"]),
            false => return AUTHORIZATION,
        };
        if location == "header" && key_header.is_none() {
            key_header = name.as_str().and_then(|name| HeaderName::from_bytes(name.as_bytes()).ok());
        }
    }
    key_header.unwrap_or(AUTHORIZATION)
}

fn array_items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse_card(card: Value) -> Result<A2aAgentCard, String> {
        A2aAgentCard::parse(&card, &A2aAddress::parse("https://h/a/.well-known/agent-card.json").unwrap())
    }

    fn parse_interface(card: Value) -> (String, A2aBinding, A2aVersion) {
        let A2aInterface { address: at, binding, version, .. } = parse_card(card).unwrap().interface;
        (at.to_string(), binding, version)
    }

    #[test]
    fn a_card_of_the_current_version_names_its_interfaces() {
        let card = json!({
            "name": "x",
            "supportedInterfaces": [
                {"url": "https://g/grpc", "protocolBinding": "GRPC", "protocolVersion": "1.0"},
                {"url": "https://h/v0", "protocolBinding": "JSONRPC", "protocolVersion": "0.3"},
                {"url": "https://h/rest", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"},
                {"url": "/rpc", "protocolBinding": "JSONRPC", "protocolVersion": "1.0", "tenant": "t"},
            ],
            "capabilities": {"streaming": true, "extensions": [{"uri": "u"}]},
            "unheardOf": [1, {"x": null}],
        });
        let card = parse_card(card).unwrap();
        assert_eq!(card.interface.address.to_string(), "https://h/rpc");
        assert_eq!(card.interface.tenant.as_deref(), Some("t"));
        assert_eq!((card.interface.binding, card.interface.version), (A2aBinding::JsonRpc, A2aVersion::V1_0));
        assert!(card.streams);
        let rest = json!({"supportedInterfaces": [
            {"url": "https://h/rest", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0"}]});
        assert_eq!(parse_interface(rest), ("https://h/rest".to_owned(), A2aBinding::Rest, A2aVersion::V1_0));
    }

    #[test]
    fn a_card_of_the_version_before_is_read_as_well() {
        let card = json!({"url": "http://h:9/", "protocolVersion": "0.3.0", "preferredTransport": "GRPC",
            "additionalInterfaces": [{"url": "http://h:9/rpc", "transport": "JSONRPC"}]});
        assert_eq!(
            parse_interface(card),
            ("http://h:9/rpc".to_owned(), A2aBinding::JsonRpc, A2aVersion::V0_3)
        );
        let oldest = json!({"url": "http://h:9/", "capabilities": {}});
        assert_eq!(parse_interface(oldest).2, A2aVersion::V0_3);
        let both = json!({"url": "http://h:9/", "protocolVersion": "0.3.0",
            "supportedInterfaces": [{"url": "http://h:9/", "protocolBinding": "JSONRPC", "protocolVersion": "1.1"}]});
        assert_eq!(parse_interface(both).2, A2aVersion::V1_0, "the newer is better");
    }

    #[test]
    fn an_agent_that_cannot_be_driven_is_refused_with_what_it_offers() {
        let grpc = json!({"supportedInterfaces": [
            {"url": "x", "protocolBinding": "GRPC", "protocolVersion": "1.0"},
            {"url": "x", "protocolBinding": "JSONRPC", "protocolVersion": "2.0"}]});
        let refused = parse_card(grpc).unwrap_err();
        assert!(refused.contains("GRPC 1.0, JSONRPC 2.0") && refused.contains("HTTP+JSON 1.0"), "{refused}");
        assert!(parse_card(json!({"name": "x"})).unwrap_err().contains("nothing"));
        let needs = json!({"url": "http://h/", "capabilities": {"extensions": [{"uri": "https://e/pay", "required": true}]}});
        assert!(parse_card(needs).unwrap_err().contains("https://e/pay"));
        assert!(parse_card(json!([1])).is_err());
    }

    #[test]
    fn a_token_goes_into_the_cards_header_or_else_into_the_usual_one() {
        let header = |more: Value| {
            let mut card = json!({"url": "http://h/"});
            card.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let card = parse_card(card).unwrap();
            let A2aCredential { header, value } = card.credential("tok\n").unwrap();
            assert!(value.is_sensitive());
            (header.to_string(), value.to_str().unwrap().to_owned())
        };
        let usual = ("authorization".to_owned(), "Bearer tok".to_owned());
        let key = ("x-key".to_owned(), "tok".to_owned());
        let (old_key, new_key) = (
            json!({"type": "apiKey", "in": "header", "name": "X-Key"}),
            json!({"apiKeySecurityScheme": {"location": "header", "name": "X-Key"}}),
        );
        let bearer = json!({"httpAuthSecurityScheme": {"scheme": "Bearer"}});
        assert_eq!(header(json!({})), usual);
        assert_eq!(header(json!({"securitySchemes": {"k": old_key}, "security": [{"k": []}]})), key);
        assert_eq!(header(json!({"securitySchemes": {"k": new_key}})), key);
        let both = json!({"b": bearer, "k": new_key});
        assert_eq!(header(json!({"securitySchemes": both})), usual);
        let required = json!([{"schemes": {"k": {"list": []}}}]);
        assert_eq!(header(json!({"securitySchemes": both, "securityRequirements": required})), key);
        let query = json!({"k": {"type": "apiKey", "in": "query", "name": "key"}});
        assert_eq!(header(json!({"securitySchemes": query})), usual);
        assert!(parse_card(json!({"url": "http://h/"})).unwrap().credential("a\u{1}b").is_err());
    }
}
