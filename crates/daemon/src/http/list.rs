//! Pages of lists: `?limit=`, `?after=`, and the header `Next-After` while there is more. Whoever reads a list asks
//! for one item more than is wanted, and so knows whether there is more.

use axum::http::header::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use qd_journal::JournalReadError;
use qd_protocol::api::NEXT_AFTER;
use qd_protocol::ids::IdParseError;
use qd_protocol::limits::PAGE_MAX;
use qd_protocol::{ApiError, ErrorCode};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;

use crate::daemon::read_failed;
use crate::edge::Json;
use crate::invalid_value;

/// The query of a list that has no filters.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// How many at most, from 1 to 1000; 1000 unless given.
    pub(super) limit: Option<usize>,
    /// Go on after this one: what `Next-After` said.
    pub(super) after: Option<String>,
}

/// How many items an answer has at most.
pub(super) fn page_limit(given: Option<usize>) -> Result<usize, ApiError> {
    match given {
        None => Ok(PAGE_MAX),
        Some(limit) if (1..=PAGE_MAX).contains(&limit) => Ok(limit),
        Some(_) => Err(invalid_value(format!("`limit` is from 1 to {PAGE_MAX}"))),
    }
}

/// What to go on after, as the id that it is.
pub(super) fn parse_after<I>(
    given: Option<&str>,
    parse: impl FnOnce(&str) -> Result<I, IdParseError>,
) -> Result<Option<I>, ApiError> {
    given.map(|text| parse(text).map_err(|_| bad_cursor(text))).transpose()
}

/// Nothing has this id, so nothing comes after it.
fn bad_cursor(text: &str) -> ApiError {
    ApiError::new(
        ErrorCode::BadCursor,
        format!("there is no {text} to go on after; take what `Next-After` said"),
    )
}

/// One page.
#[derive(Debug)]
pub(super) struct ListPage<T> {
    items: Vec<T>,
    next: Option<String>,
}

impl<T> ListPage<T> {
    /// Of items of which there is one too many if there is more.
    pub(super) fn from_fetched(mut items: Vec<T>, limit: usize, id: impl Fn(&T) -> &str) -> Self {
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|last| id(last).to_owned());
        Self { items, next }
    }

    /// Of a list that is here as a whole.
    pub(super) fn from_complete(
        mut items: Vec<T>,
        query: &ListQuery,
        id: impl Fn(&T) -> &str,
    ) -> Result<Self, ApiError> {
        let limit = page_limit(query.limit)?;
        if let Some(after) = &query.after {
            let at = items.iter().position(|item| id(item) == after).ok_or_else(|| bad_cursor(after))?;
            items.drain(..=at);
        }
        Ok(Self::from_fetched(items, limit, id))
    }
}

impl<T: Serialize> IntoResponse for ListPage<T> {
    fn into_response(self) -> Response {
        let mut response = Json(self.items).into_response();
        if let Some(next) = self.next.and_then(|next| HeaderValue::try_from(next).ok()) {
            response.headers_mut().insert(HeaderName::from_static(NEXT_AFTER), next);
        }
        response
    }
}

/// Rows that are read at once where only some are wanted, or only a part of each.
const READ_CHUNK: usize = 128;
/// The same where few are left to find.
const READ_CHUNK_MIN: usize = 16;

/// Reads rows until one more is found than `limit`, or there are no more. `take` makes an item of a row, or passes it
/// over. A row may be much larger than its item, so few are held at a time.
pub(super) async fn read_filtered<R, I, T, F>(
    limit: usize,
    mut after: Option<I>,
    read: impl Fn(Option<I>, usize) -> F,
    id: impl Fn(&R) -> I,
    mut take: impl FnMut(R) -> Result<Option<T>, ApiError>,
) -> Result<Vec<T>, ApiError>
where
    F: Future<Output = Result<Vec<R>, JournalReadError>>,
{
    let mut found = Vec::new();
    loop {
        let size = (limit + 1 - found.len()).clamp(READ_CHUNK_MIN, READ_CHUNK);
        let rows = read(after.take(), size).await.map_err(read_failed)?;
        let end = rows.len() < size;
        after = rows.last().map(&id);
        for row in rows {
            found.extend(take(row)?);
            if found.len() > limit {
                return Ok(found);
            }
        }
        if end {
            return Ok(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn query(limit: Option<usize>, after: Option<&str>) -> ListQuery {
        ListQuery { limit, after: after.map(str::to_owned) }
    }

    #[test]
    fn a_limit_is_from_1_to_the_most() {
        assert_eq!(page_limit(None), Ok(PAGE_MAX));
        assert_eq!(page_limit(Some(1)), Ok(1));
        assert_eq!(page_limit(Some(PAGE_MAX)), Ok(PAGE_MAX));
        for bad in [0, PAGE_MAX + 1, usize::MAX] {
            assert_eq!(page_limit(Some(bad)).unwrap_err().code, ErrorCode::InvalidValue);
        }
    }

    #[test]
    fn a_page_says_where_to_go_on_only_while_there_is_more() {
        let items = || vec!["a", "b", "c"];
        let next =
            |limit| ListPage::from_complete(items(), &query(Some(limit), None), |item| item).unwrap().next;
        assert_eq!(next(2).as_deref(), Some("b"));
        assert_eq!(next(3), None);
        assert_eq!(next(4), None);
        let response = ListPage::from_fetched(items(), 2, |item| item).into_response();
        assert_eq!(response.headers()["next-after"], "b");
        let response = ListPage::from_fetched(items(), 3, |item| item).into_response();
        assert!(!response.headers().contains_key("next-after"));
    }

    #[test]
    fn a_cursor_that_nobody_gave_out_is_refused() {
        let error = ListPage::from_complete(vec!["a"], &query(None, Some("z")), |item| item).unwrap_err();
        assert_eq!(error.code, ErrorCode::BadCursor);
        let error = parse_after(Some("a b"), qd_protocol::RunId::parse).unwrap_err();
        assert_eq!(error.code, ErrorCode::BadCursor);
    }

    proptest! {
        #[test]
        fn a_list_walked_in_pages_gives_every_wanted_item_once(count in 0_usize..400, step in 1_usize..50, of in 1_usize..40) {
            let rows: Vec<usize> = (1..=count).collect();
            let wanted: Vec<usize> = rows.iter().copied().filter(|row| row.is_multiple_of(of)).collect();
            let read = |after: Option<usize>, size: usize| {
                let page: Vec<usize> = rows.iter().copied().filter(|row| Some(*row) > after).take(size).collect();
                std::future::ready(Ok(page))
            };
            let (mut seen, mut after) = (Vec::new(), None);
            loop {
                let take = |row: usize| Ok((row.is_multiple_of(of)).then(|| row.to_string()));
                let found = read_filtered(step, after, read, |row| *row, take);
                let found = futures_util::FutureExt::now_or_never(found).unwrap().unwrap();
                let page = ListPage::from_fetched(found, step, |item| item);
                prop_assert!(page.next.is_none() || page.items.len() == step);
                seen.extend(page.items.iter().map(|item| item.parse::<usize>().unwrap()));
                match page.next {
                    Some(next) => after = Some(next.parse().unwrap()),
                    None => break,
                }
            }
            prop_assert_eq!(seen, wanted);
        }
    }
}
