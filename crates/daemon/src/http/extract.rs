//! Extractors: ids in a path, queries, bodies with an `Idempotency-Key`. Invalid input is refused here, in the format
//! of every error, so that handlers only see valid values.

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use qd_protocol::limits::IDEMPOTENCY_KEY_MAX;
use qd_protocol::{ApiError, ErrorCode};
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::actor::IdempotencyKey;
use crate::edge::{HttpError, read_whole_body};
use crate::invalid_value;

/// The header under which a repeated request has its effect once.
const IDEMPOTENCY_KEY_HEADER: &str = "idempotency-key";

/// The ids in a path. A malformed id is a 404, like an unknown one.
#[derive(Debug)]
pub(super) struct PathIds<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathIds<T> {
    type Rejection = HttpError;

    async fn from_request_parts(head: &mut Parts, state: &S) -> Result<Self, HttpError> {
        match Path::from_request_parts(head, state).await {
            Ok(Path(ids)) => Ok(Self(ids)),
            Err(_) => {
                let message = format!("there is nothing at {}", head.uri.path());
                Err(HttpError(ApiError::new(ErrorCode::NotFound, message)))
            }
        }
    }
}

/// The query, as a struct. Unknown fields are refused.
#[derive(Debug)]
pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = HttpError;

    async fn from_request_parts(head: &mut Parts, _: &S) -> Result<Self, HttpError> {
        match axum::extract::Query::try_from_uri(&head.uri) {
            Ok(axum::extract::Query(query)) => Ok(Self(query)),
            Err(rejection) => {
                let text = rejection.body_text();
                let reason = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
                Err(HttpError(invalid_value(format!("the query is not valid for this route: {reason}"))))
            }
        }
    }
}

/// A body, extracted by `E`, with the `Idempotency-Key` that came with it.
#[derive(Debug)]
pub(super) struct KeyedBody<E>(pub(super) Option<IdempotencyKey>, pub(super) E);

impl<E: FromRequest<S, Rejection = HttpError>, S: Send + Sync> FromRequest<S> for KeyedBody<E> {
    type Rejection = HttpError;

    async fn from_request(request: Request, state: &S) -> Result<Self, HttpError> {
        let (head, body) = request.into_parts();
        let body = read_whole_body(body).await?;
        let key = idempotency_key(&head, &body)?;
        let extracted = E::from_request(Request::from_parts(head, Body::from(body)), state).await?;
        Ok(Self(key, extracted))
    }
}

fn idempotency_key(head: &Parts, body: &[u8]) -> Result<Option<IdempotencyKey>, ApiError> {
    let mut values = head.headers.get_all(IDEMPOTENCY_KEY_HEADER).iter();
    let Some(first) = values.next() else { return Ok(None) };
    let text = first.to_str().ok().filter(|text| (1..=IDEMPOTENCY_KEY_MAX).contains(&text.len()));
    let (Some(text), None) = (text, values.next()) else {
        let message =
            format!("an Idempotency-Key must be one header of 1 to {IDEMPOTENCY_KEY_MAX} visible characters");
        return Err(invalid_value(message));
    };
    let (method, path) = (head.method.as_str(), head.uri.path());
    Ok(Some(IdempotencyKey {
        key: scoped_key(method, path, text),
        fingerprint: request_fingerprint(method, path, body),
    }))
}

/// A key is scoped to its route, so that clients of two routes may use the same key.
fn scoped_key(method: &str, path: &str, key: &str) -> String {
    format!("{method} {path} {key}")
}

/// Distinguishes requests under the same key. Neither a method nor a path contains a line feed.
fn request_fingerprint(method: &str, path: &str, body: &[u8]) -> [u8; 32] {
    let hash = Sha256::new().chain_update(method).chain_update("\n").chain_update(path).chain_update("\n");
    hash.chain_update(body).finalize().into()
}

#[cfg(test)]
mod tests {
    use axum::http::Method;
    use qd_protocol::SessionId;
    use serde::Deserialize;

    use super::super::list::ListQuery;
    use super::*;
    use crate::edge::Json;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct TestKeyedBody {
        dish: String,
    }

    fn post(path: &str, keys: &[&str], body: &str) -> Request {
        let mut request = Request::builder().method(Method::POST).uri(path);
        for key in keys {
            request = request.header("Idempotency-Key", *key);
        }
        request.body(Body::from(body.to_owned())).unwrap()
    }

    async fn keyed(path: &str, keys: &[&str], body: &str) -> Result<Option<IdempotencyKey>, ApiError> {
        let extracted = KeyedBody::<Json<TestKeyedBody>>::from_request(post(path, keys, body), &()).await;
        extracted
            .map(|KeyedBody(key, Json(dish))| {
                assert_eq!(dish.dish, "soup");
                key
            })
            .map_err(|HttpError(error)| error)
    }

    const SOUP: &str = r#"{"dish":"soup"}"#;

    #[tokio::test]
    async fn a_key_is_bound_to_its_route_and_its_body() {
        assert!(keyed("/a", &[], SOUP).await.unwrap().is_none());
        let first = keyed("/a", &["k"], SOUP).await.unwrap().unwrap();
        let again = keyed("/a", &["k"], SOUP).await.unwrap().unwrap();
        assert_eq!((&first.key, first.fingerprint), (&again.key, again.fingerprint));
        let elsewhere = keyed("/b", &["k"], SOUP).await.unwrap().unwrap();
        assert!(elsewhere.key != first.key && elsewhere.fingerprint != first.fingerprint);
        let other = keyed("/a", &["k"], r#"{ "dish": "soup" }"#).await.unwrap().unwrap();
        assert!(other.key == first.key && other.fingerprint != first.fingerprint);
        assert_ne!(request_fingerprint("POST", "/a", b"b"), request_fingerprint("POST", "/", b"ab"));
    }

    #[tokio::test]
    async fn a_key_that_is_none_is_refused_and_so_are_two() {
        for keys in [&[""][..], &[&"k".repeat(256)], &["\u{e4}"], &["a", "b"]] {
            let error = keyed("/a", keys, SOUP).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidValue, "{keys:?}");
        }
        assert!(keyed("/a", &[&"k".repeat(255)], SOUP).await.is_ok());
    }

    async fn query(text: &str) -> Result<ListQuery, ApiError> {
        let (mut head, ()) =
            axum::http::Request::builder().uri(format!("/x?{text}")).body(()).unwrap().into_parts();
        let extracted = Query::from_request_parts(&mut head, &()).await;
        extracted.map(|Query(query)| query).map_err(|HttpError(error)| error)
    }

    #[tokio::test]
    async fn what_is_wrong_with_a_query_is_said_in_a_sentence() {
        let good = query("limit=7&after=run_1").await.unwrap();
        assert_eq!((good.limit, good.after.as_deref()), (Some(7), Some("run_1")));
        for (text, hint) in [
            ("limit=many", "limit: invalid digit"),
            ("limit=-1", "limit: invalid digit"),
            ("limt=7", "unknown field `limt`"),
            ("limit=1&limit=2", "duplicate field `limit`"),
        ] {
            let error = query(text).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidValue, "{text}");
            assert!(error.message.contains(hint), "{error}");
        }
    }

    #[tokio::test]
    async fn a_path_with_what_is_no_id_is_not_found() {
        use axum::routing::get;
        use tower::ServiceExt;
        let router: axum::Router = axum::Router::new()
            .route("/{s}", get(async |PathIds(id): PathIds<SessionId>| id.to_string()))
            .route("/{s}/{t}", get(async |PathIds((_, id)): PathIds<(SessionId, SessionId)>| id.to_string()));
        for (path, status) in [
            ("/ses_1", 200),
            ("/ses_1/ses_2", 200),
            ("/%ff", 404),
            ("/a%20b", 404),
            ("/..%2f", 404),
            ("/a/%00", 404),
        ] {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status().as_u16(), status, "{path}");
        }
    }
}
