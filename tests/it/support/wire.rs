//! As much of PostgreSQL's protocol as the proxy reads: where a COMMIT is, and which answer is
//! the answer to it.
//!
//! A client may send several requests before it reads an answer, so the answer to a COMMIT is
//! found by counting. Each simple query, each Sync and each function call is one *cycle*, and the
//! server ends each cycle with one ReadyForQuery. The start of a session is cycle 1.
//!
//! Without TLS: an encrypted connection cannot be read.

use std::collections::HashSet;

/// The requests of one connection.
pub(super) struct Requests {
    /// The beginning of a request whose end has not been seen.
    partial: Vec<u8>,
    session_started: bool,
    cycles: u64,
    /// Prepared statements and portals that are a COMMIT.
    statements: HashSet<Vec<u8>>,
    portals: HashSet<Vec<u8>>,
}

/// A COMMIT among the requests.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Commit {
    /// How many bytes of the chunk come before it.
    pub(super) offset: usize,
    /// The cycle that it is part of.
    pub(super) cycle: u64,
}

const PROTOCOL_3: i32 = 3;

impl Requests {
    pub(super) fn new() -> Self {
        Self {
            partial: Vec::new(),
            session_started: false,
            cycles: 1,
            statements: HashSet::new(),
            portals: HashSet::new(),
        }
    }

    /// Reads a chunk, and returns the first COMMIT that it completes.
    pub(super) fn read(&mut self, chunk: &[u8]) -> Option<Commit> {
        let before = self.partial.len();
        let mut bytes = std::mem::take(&mut self.partial);
        bytes.extend_from_slice(chunk);

        let mut commit = None;
        let mut start = 0;
        // The first request of a session has no type.
        while let Some(end) = end_of(&bytes[start..], usize::from(self.session_started)) {
            let request = &bytes[start..start + end];
            if let Some(cycle) = self.request(request) {
                commit.get_or_insert(Commit {
                    offset: start.saturating_sub(before),
                    cycle,
                });
            }
            start += end;
        }
        bytes.drain(..start);
        self.partial = bytes;
        commit
    }

    /// Reads one request, and returns its cycle if it is a COMMIT.
    fn request(&mut self, request: &[u8]) -> Option<u64> {
        if !self.session_started {
            // Anything else asks for encryption, or to cancel a query of another session.
            self.session_started = int(&request[4..]).is_some_and(|code| code >> 16 == PROTOCOL_3);
            return None;
        }
        let (kind, mut body) = (request[0], &request[5..]);
        match kind {
            b'Q' => {
                self.cycles += 1;
                return is_commit(text(&mut body)).then_some(self.cycles);
            }
            b'S' | b'F' => self.cycles += 1,
            b'P' => {
                let statement = text(&mut body).to_vec();
                remember(&mut self.statements, statement, is_commit(text(&mut body)));
            }
            b'B' => {
                let portal = text(&mut body).to_vec();
                let commits = self.statements.contains(text(&mut body));
                remember(&mut self.portals, portal, commits);
            }
            b'E' if self.portals.contains(text(&mut body)) => return Some(self.cycles + 1),
            _ => {}
        }
        None
    }
}

fn remember(set: &mut HashSet<Vec<u8>>, name: Vec<u8>, commits: bool) {
    if commits {
        set.insert(name);
    } else {
        set.remove(&name);
    }
}

fn is_commit(sql: &[u8]) -> bool {
    let sql = sql.trim_ascii();
    let sql = sql.strip_suffix(b";").unwrap_or(sql);
    sql.trim_ascii().eq_ignore_ascii_case(b"COMMIT")
}

/// Takes a text that ends with a zero byte.
fn text<'a>(body: &mut &'a [u8]) -> &'a [u8] {
    let bytes = *body;
    let length = bytes.iter().position(|byte| *byte == 0);
    let length = length.unwrap_or(bytes.len());
    *body = bytes.get(length + 1..).unwrap_or_default();
    &bytes[..length]
}

/// The answers of one connection.
pub(super) struct Answers {
    partial: Vec<u8>,
    cycles: u64,
}

/// What to do with a chunk of answers.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Kept {
    /// How many bytes come before the answer looked for.
    pub(super) before: usize,
    /// Whether that answer is complete.
    pub(super) complete: bool,
}

impl Answers {
    pub(super) fn new() -> Self {
        Self {
            partial: Vec::new(),
            cycles: 0,
        }
    }

    /// Reads a chunk, and finds the answer that is cycle number `wanted` in it.
    pub(super) fn read(&mut self, chunk: &[u8], wanted: Option<u64>) -> Kept {
        let before = self.partial.len();
        let mut bytes = std::mem::take(&mut self.partial);
        bytes.extend_from_slice(chunk);

        // Whatever arrives after the cycle before it belongs to the answer wanted.
        let mut kept = match wanted {
            Some(wanted) if self.cycles + 1 >= wanted => 0,
            _ => chunk.len(),
        };
        let mut start = 0;
        while let Some(end) = end_of(&bytes[start..], 1) {
            let ready = bytes[start] == b'Z';
            start += end;
            if ready {
                self.cycles += 1;
                if wanted.is_some_and(|wanted| self.cycles + 1 == wanted) {
                    kept = start.saturating_sub(before);
                }
            }
        }
        bytes.drain(..start);
        self.partial = bytes;
        Kept {
            before: kept,
            complete: wanted.is_some_and(|wanted| self.cycles >= wanted),
        }
    }
}

/// Where the message at the beginning of `bytes` ends, whose length stands after `skip` bytes and
/// does not count those.
fn end_of(bytes: &[u8], skip: usize) -> Option<usize> {
    let length = int(bytes.get(skip..)?)?;
    let end = skip + usize::try_from(length).ok().filter(|length| *length >= 4)?;
    (bytes.len() >= end).then_some(end)
}

fn int(bytes: &[u8]) -> Option<i32> {
    Some(i32::from_be_bytes(*bytes.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).unwrap();
        [&[kind], &length.to_be_bytes()[..], body].concat()
    }

    /// A session that has started.
    fn started() -> Requests {
        let mut requests = Requests::new();
        assert_eq!(requests.read(b"\0\0\0\x11\0\x03\0\0user\0me\0\0"), None);
        assert!(requests.session_started);
        requests
    }

    #[test]
    fn a_commit_is_found_behind_other_requests() {
        let begin = message(b'Q', b"BEGIN\0");
        let chunk = [&begin[..], &message(b'Q', b" commit; \0")].concat();
        let commit = started().read(&chunk);
        let (offset, cycle) = (begin.len(), 3);
        assert_eq!(commit, Some(Commit { offset, cycle }));
    }

    #[test]
    fn a_commit_is_found_however_it_is_cut_up() {
        let mut requests = started();
        let chunk = message(b'Q', b"COMMIT\0");
        let (last, first) = chunk.split_last().unwrap();
        for byte in first {
            assert_eq!(requests.read(&[*byte]), None);
        }
        let commit = Some(Commit {
            offset: 0,
            cycle: 2,
        });
        assert_eq!(requests.read(&[*last]), commit);
    }

    #[test]
    fn a_prepared_commit_is_found_where_it_is_executed() {
        let mut requests = started();
        let prepare = [message(b'P', b"s1\0COMMIT\0\0\0"), message(b'S', b"")].concat();
        assert_eq!(requests.read(&prepare), None);
        let bind = message(b'B', b"\0s1\0\0\0\0\0\0\0");
        let execute = message(b'E', b"\0\0\0\0\0");
        let sync = message(b'S', b"");
        let commit = requests.read(&[&bind[..], &execute, &sync].concat());
        let (offset, cycle) = (bind.len(), 3);
        assert_eq!(commit, Some(Commit { offset, cycle }));
    }

    #[test]
    fn what_only_mentions_a_commit_is_none() {
        for sql in [&b"SELECT 'COMMIT'\0"[..], b"COMMIT PREPARED 'x'\0", b"\0"] {
            assert_eq!(started().read(&message(b'Q', sql)), None);
        }
    }

    #[test]
    fn the_answer_to_a_commit_is_told_from_the_answers_before_it() {
        let ready = message(b'Z', b"T");
        let done = message(b'C', b"COMMIT\0");
        let mut answers = Answers::new();
        let start = [&message(b'R', b"\0\0\0\0")[..], &ready].concat();
        let kept = answers.read(&start, None);
        assert_eq!((kept.before, kept.complete), (start.len(), false));

        // The end of cycle 2 and the beginning of cycle 3, which is the one wanted.
        let kept = answers.read(&[&ready[..], &done].concat(), Some(3));
        assert_eq!((kept.before, kept.complete), (ready.len(), false));
        let kept = answers.read(&ready, Some(3));
        assert_eq!((kept.before, kept.complete), (0, true));
    }
}
