//! Errors and JSON on the wire: the error format of the contract, and the extractors for bodies. A bad body is a 400
//! with one sentence, or a 413 if it is too large.

use axum::extract::{FromRequest, Request};
use axum::http::header::{self, HeaderValue};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use qd_protocol::error::ErrorBody;
use qd_protocol::{ApiError, ErrorCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::body::read_whole_body;

/// An error as an HTTP response.
#[derive(Debug, Clone, PartialEq)]
pub struct HttpError(pub ApiError);

impl From<ApiError> for HttpError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let code = self.0.code;
        if std::error::Error::source(&self.0).is_some() {
            log_failure(&self.0);
        }
        let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, json_response(&ErrorBody::from(self.0))).into_response();
        let headers = response.headers_mut();
        match code.status() {
            401 => drop(headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
            429 | 503 => drop(headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"))),
            _ => {}
        }
        response
    }
}

/// Logs a failure of the daemon itself with everything that caused it; the client is told the message alone. A bug is
/// an error, and a disk that fails is a warning: the next request may succeed.
fn log_failure(error: &ApiError) {
    let (code, error) = (error.code, error_chain(error));
    match code {
        ErrorCode::Internal => tracing::error!(code = code.as_str(), error, "a request failed"),
        _ => tracing::warn!(code = code.as_str(), error, "a request failed"),
    }
}

/// An error and everything that caused it, from the outside in. A cause that its effect already quotes is left out.
fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut chain = error.to_string();
    for cause in std::iter::successors(error.source(), |cause| cause.source()) {
        let cause = cause.to_string();
        if !chain.contains(&cause) {
            chain.push_str(&format!(": {cause}"));
        }
    }
    chain
}

/// A JSON body, of a request or a response.
#[derive(Debug, Clone, Copy, Default)]
pub struct Json<T>(pub T);

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        json_response(&self.0)
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, _: &S) -> Result<Self, HttpError> {
        let (head, body) = request.into_parts();
        let body = read_whole_body(body).await?;
        if body.is_empty() {
            return Err(invalid_request("this request needs a body in JSON"));
        }
        parse_json(&head.headers, &body).map(Self)
    }
}

/// A JSON body that may be absent.
#[derive(Debug, Clone, Copy, Default)]
pub struct OptionalJson<T>(pub T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for OptionalJson<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, _: &S) -> Result<Self, HttpError> {
        let (head, body) = request.into_parts();
        let body = read_whole_body(body).await?;
        if body.is_empty() { Ok(Self(T::default())) } else { parse_json(&head.headers, &body).map(Self) }
    }
}

/// A body as raw bytes, within the same limits.
#[derive(Debug, Clone, Default)]
pub struct RawBody(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for RawBody {
    type Rejection = HttpError;

    async fn from_request(request: Request, _: &S) -> Result<Self, HttpError> {
        Ok(Self(read_whole_body(request.into_body()).await?))
    }
}

fn parse_json<T: DeserializeOwned>(headers: &HeaderMap, body: &[u8]) -> Result<T, HttpError> {
    check_content_type(headers)?;
    serde_json::from_slice(body)
        .map_err(|error| invalid_request(format!("the body is not valid for this route: {error}")))
}

/// A web page can send plain text and forms to any site without a preflight, but not `application/json`.
fn check_content_type(headers: &HeaderMap) -> Result<(), HttpError> {
    for value in headers.get_all(header::CONTENT_TYPE) {
        let text = value.to_str().unwrap_or_default();
        let kind = text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if kind != "application/json" && !(kind.starts_with("application/") && kind.ends_with("+json")) {
            return Err(invalid_request(
                "the body must be JSON, with the header `Content-Type: application/json`",
            ));
        }
    }
    Ok(())
}

/// The error for a bug in the daemon; the log has the details.
pub(crate) fn internal_error() -> ApiError {
    ApiError::new(
        ErrorCode::Internal,
        "internal error in the daemon, not in the request; see the daemon's log",
    )
}

fn invalid_request(message: impl Into<String>) -> HttpError {
    HttpError(ApiError::new(ErrorCode::InvalidRequest, message))
}

fn json_response(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => {
            tracing::error!(%error, "could not encode a response as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use http_body_util::BodyExt;
    use serde::Deserialize;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct TestJsonBody {
        #[serde(default)]
        dish: String,
    }

    fn request(kind: Option<&str>, body: &str) -> Request {
        let mut request = Request::builder();
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        request.body(Body::from(body.to_owned())).unwrap()
    }

    async fn extract_json(kind: Option<&str>, body: &str) -> Result<TestJsonBody, ApiError> {
        Json::from_request(request(kind, body), &())
            .await
            .map(|Json(order)| order)
            .map_err(|HttpError(error)| error)
    }

    #[tokio::test]
    async fn a_body_is_taken_as_json_and_from_no_form() {
        let good = r#"{"dish":"soup"}"#;
        for kind in [
            None,
            Some("application/json"),
            Some("Application/JSON; charset=utf-8"),
            Some("application/merge-patch+json"),
        ] {
            assert_eq!(extract_json(kind, good).await.unwrap().dish, "soup", "{kind:?}");
        }
        for kind in [
            "text/plain",
            "text/plain; application/json",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "",
        ] {
            let error = extract_json(Some(kind), good).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidRequest, "{kind}");
            assert!(error.message.contains("application/json"), "{error}");
        }
    }

    #[tokio::test]
    async fn what_is_wrong_with_a_body_is_said_in_a_sentence() {
        for (body, hint) in [
            ("", "needs a body"),
            ("{", "EOF"),
            (r#"{"dsh":"soup"}"#, "unknown field `dsh`"),
            (r#"{"dish":7}"#, "expected a string at line 1 column 9"),
            ("[] []", "trailing"),
        ] {
            let error = extract_json(None, body).await.unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidRequest);
            assert!(error.message.contains(hint), "{error}");
        }
    }

    #[tokio::test]
    async fn a_body_that_may_be_left_out_may_be_left_out() {
        let take =
            async |kind, body| OptionalJson::<TestJsonBody>::from_request(request(kind, body), &()).await;
        assert_eq!(take(Some("text/plain"), "").await.unwrap().0, TestJsonBody::default());
        assert_eq!(take(None, r#"{"dish":"soup"}"#).await.unwrap().0.dish, "soup");
        assert_eq!(take(None, "nonsense").await.unwrap_err().0.code, ErrorCode::InvalidRequest);
    }

    #[tokio::test]
    async fn the_cause_of_a_failure_is_for_the_log_and_not_for_the_client() {
        let disk = std::io::Error::other(ApiError::new(ErrorCode::Internal, "sector 7"));
        let error = ApiError::new(ErrorCode::StorageFailed, "one sentence").with_source(disk);
        assert_eq!(error_chain(&error), "one sentence: sector 7");
        let quoting = ApiError::caused_by(ErrorCode::Internal, std::io::Error::other("sector 7"));
        assert_eq!(error_chain(&quoting), "sector 7");
        let body = HttpError(error).into_response().into_body().collect().await.unwrap().to_bytes();
        assert!(!String::from_utf8(body.to_vec()).unwrap().contains("sector"));
    }

    #[tokio::test]
    async fn every_refusal_has_the_shape_of_the_contract() {
        for code in ErrorCode::ALL {
            let error = ApiError::new(*code, "one sentence").with_detail("key", 1);
            let response = HttpError(error).into_response();
            assert_eq!(response.status().as_u16(), code.status());
            assert_eq!(response.headers()["content-type"], "application/json");
            let retry_after = response.headers().get("retry-after").map(|value| value.to_str().unwrap());
            assert_eq!(retry_after, matches!(code.status(), 429 | 503).then_some("1"), "{code:?}");
            assert_eq!(response.headers().contains_key("www-authenticate"), code.status() == 401);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            let expected = serde_json::json!({
                "error": {"code": code.as_str(), "message": "one sentence", "details": {"key": 1}}
            });
            assert_eq!(body, expected);
        }
    }
}
