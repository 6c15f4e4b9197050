//! Pages of lists: `?limit=`, `?after=`, and the header `Next-After` while there is more. A handler fetches one item
//! more than requested, to know whether there is more.

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

/// The query of a list without filters.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// The most items to return, 1 to 1000. Default 1000.
    pub(super) limit: Option<usize>,
    /// Continue after this item: the value of `Next-After`.
    pub(super) after: Option<String>,
}

/// Validates `limit`, and applies its default.
pub(super) fn page_limit(given: Option<usize>) -> Result<usize, ApiError> {
    match given {
        None => Ok(PAGE_MAX),
        Some(limit) if (1..=PAGE_MAX).contains(&limit) => Ok(limit),
        Some(_) => Err(invalid_value(format!("`limit` must be from 1 to {PAGE_MAX}"))),
    }
}

/// Parses `after` as an id.
pub(super) fn parse_after<I>(
    given: Option<&str>,
    parse: impl FnOnce(&str) -> Result<I, IdParseError>,
) -> Result<Option<I>, ApiError> {
    given.map(|text| parse(text).map_err(|_| bad_cursor(text))).transpose()
}

/// The error for an `after` that names no item of the list.
fn bad_cursor(text: &str) -> ApiError {
    ApiError::new(
        ErrorCode::BadCursor,
        format!("there is no {text} to continue after; use the value of `Next-After`"),
    )
}

#[derive(Debug)]
pub(super) struct ListPage<T> {
    items: Vec<T>,
    next: Option<String>,
}

impl<T> ListPage<T> {
    /// A page of items that were fetched with one extra, which shows that there is more.
    pub(super) fn from_fetched(mut items: Vec<T>, limit: usize, id: impl Fn(&T) -> &str) -> Self {
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|last| id(last).to_owned());
        Self { items, next }
    }

    /// A page of a list that is completely in memory.
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

/// How many rows are read at once where some are filtered out, or only a part of each is used.
const READ_CHUNK: usize = 128;
/// The smallest number of rows that are read at once, when few items are missing.
const READ_CHUNK_MIN: usize = 16;

/// Reads rows until there is one item more than `limit`, or there are no more rows. `take` turns a row into an item,
/// or skips it. A row may be much larger than its item, so few rows are held at a time.
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
    let mut items = Vec::new();
    loop {
        let size = (limit + 1 - items.len()).clamp(READ_CHUNK_MIN, READ_CHUNK);
        let rows = read(after.take(), size).await.map_err(read_failed)?;
        let end = rows.len() < size;
        after = rows.last().map(&id);
        for row in rows {
            items.extend(take(row)?);
            if items.len() > limit {
                return Ok(items);
            }
        }
        if end {
            return Ok(items);
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
