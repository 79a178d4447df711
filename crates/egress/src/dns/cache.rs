//! Answers of name servers, kept for all sandboxes until they expire. Both the number of answers and their records are bounded.

use std::collections::HashMap;
use std::time::Duration;

use domain::DomainName;
use hickory_proto::rr::{Record, RecordType};
use tokio::time::Instant;

use super::upstream::LookupError;

const MAX_CACHED_ANSWERS: usize = 4096;
const MAX_CACHE_TIME: Duration = Duration::from_secs(6 * 60 * 60);
/// How long it is remembered that a name or a type of record does not exist.
const NEGATIVE_CACHE_TIME: Duration = Duration::from_secs(10);

type CacheKey = (DomainName, RecordType);
type Answer = Result<Vec<Record>, LookupError>;

#[derive(Default)]
pub(super) struct AnswerCache {
    answers: HashMap<CacheKey, CachedAnswer>,
}

struct CachedAnswer {
    answer: Answer,
    stored: Instant,
    expires: Instant,
}

impl AnswerCache {
    /// Returns an answer that is still valid, with the time that its records are valid from now on.
    pub(super) fn find(&mut self, key: &CacheKey) -> Option<Answer> {
        let now = Instant::now();
        let found = self.answers.get(key)?;
        if found.expires <= now {
            self.answers.remove(key);
            return None;
        }
        let age = u32::try_from(now.duration_since(found.stored).as_secs()).unwrap_or(u32::MAX);
        let mut answer = found.answer.clone();
        for record in answer.iter_mut().flatten() {
            record.ttl = record.ttl.saturating_sub(age);
        }
        Some(answer)
    }

    /// Stores an answer. A lookup that failed is not an answer.
    pub(super) fn store(&mut self, key: CacheKey, answer: &Answer) {
        let valid = match answer {
            Ok(records) => {
                let shortest = records.iter().map(|record| record.ttl).min().unwrap_or(0);
                Duration::from_secs(shortest.into()).min(MAX_CACHE_TIME)
            }
            Err(LookupError::NoName | LookupError::NoRecords) => NEGATIVE_CACHE_TIME,
            Err(LookupError::Unavailable) => return,
        };
        if valid.is_zero() {
            return;
        }
        let stored = Instant::now();
        self.make_room(stored);
        self.answers.insert(key, CachedAnswer { answer: answer.clone(), stored, expires: stored + valid });
    }

    /// Removes what has expired if the cache is full, and everything if that is not enough.
    fn make_room(&mut self, now: Instant) {
        if self.answers.len() < MAX_CACHED_ANSWERS {
            return;
        }
        self.answers.retain(|_, cached| cached.expires > now);
        if self.answers.len() >= MAX_CACHED_ANSWERS / 2 {
            self.answers.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::A;
    use hickory_proto::rr::{Name, RData};

    use super::*;

    fn key(name: &str) -> CacheKey {
        (name.parse().expect("a name"), RecordType::A)
    }

    fn answer(seconds: u32) -> Answer {
        Ok(vec![Record::from_rdata(Name::root(), seconds, RData::A(A::new(192, 0, 2, 1)))])
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_valid_for_the_rest_of_their_time() {
        let mut cache = AnswerCache::default();
        cache.store(key("a.org"), &answer(60));
        tokio::time::advance(Duration::from_secs(20)).await;
        let found = cache.find(&key("a.org")).expect("it is valid").expect("records");
        assert_eq!(found[0].ttl, 40);
        tokio::time::advance(Duration::from_secs(40)).await;
        assert!(cache.find(&key("a.org")).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn missing_names_are_remembered_and_failures_are_not() {
        let mut cache = AnswerCache::default();
        cache.store(key("a.org"), &Err(LookupError::NoName));
        cache.store(key("b.org"), &Err(LookupError::Unavailable));
        cache.store(key("c.org"), &answer(0));
        assert_eq!(cache.find(&key("a.org")).map(|found| found.err()), Some(Some(LookupError::NoName)));
        assert!(cache.find(&key("b.org")).is_none() && cache.find(&key("c.org")).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn number_of_answers_is_bounded() {
        let mut cache = AnswerCache::default();
        for number in 0..3 * MAX_CACHED_ANSWERS {
            cache.store(key(&format!("n{number}.org")), &answer(60));
        }
        assert!(cache.answers.len() <= MAX_CACHED_ANSWERS);
    }
}
