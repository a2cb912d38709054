//! The alert, and how it gets to the webhook.

use std::time::Duration;

use anyhow::ensure;
use outbox_core::{Delivery, Handler, HandlerError, OutboxEvent};
use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Client, StatusCode, Url};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The setting with the webhook's URL.
pub(crate) const WEBHOOK_URL: &str = "SLACK_WEBHOOK_URL";

/// The request header with the idempotency key.
pub(crate) const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// Something needs a person. However often it is noticed, it is one alert per incident.
///
/// The times are short, so that the story is. The defaults give a webhook two hours to recover.
#[derive(Clone, Serialize, Deserialize, OutboxEvent)]
#[outbox(
    dedup_key = "{incident}",
    timeout = "1s",
    backoff(base = "200ms", max = "1s", jitter = 0.2)
)]
pub(crate) struct AlertRaised {
    pub(crate) incident: String,
    pub(crate) text: String,
}

/// What tells an idempotency key from the others here: the number of the event's row.
pub(crate) fn number(key: &str) -> String {
    let row = key.rsplit('-').next().unwrap_or(key);
    format!("#{row}")
}

/// Posts an alert to the webhook.
pub(crate) struct PostToChat {
    client: Client,
    webhook: Url,
}

impl PostToChat {
    pub(crate) fn new(webhook: Url, name: &str) -> reqwest::Result<Self> {
        // No timeout of its own: a run that takes too long is dropped, and its request with it.
        // No proxy of the environment either: it does not know the way to this machine.
        let client = Client::builder().user_agent(name).no_proxy().build()?;
        Ok(Self { client, webhook })
    }
}

impl Handler<AlertRaised> for PostToChat {
    async fn handle(&self, alert: AlertRaised, delivery: &Delivery) -> Result<(), HandlerError> {
        let request = self
            .client
            .post(self.webhook.clone())
            // The same for every attempt: it tells the receiver that it knows this alert.
            .header(IDEMPOTENCY_KEY, delivery.event_id().to_string())
            .json(&json!({ "text": alert.text }));
        // Errors are stored and logged. Whoever knows a webhook's URL can post to it, so it is not
        // in them.
        let response = request.send().await.map_err(reqwest::Error::without_url)?;
        let (status, wait) = (response.status(), retry_after(response.headers()));
        let text = response.text().await.map_err(reqwest::Error::without_url)?;
        judge(status, wait, &text)
    }
}

/// What an answer means for the alert.
fn judge(status: StatusCode, wait: Option<Duration>, text: &str) -> Result<(), HandlerError> {
    let error = format!("{status}: {text}");
    match (status, wait) {
        (status, _) if status.is_success() => Ok(()),
        (StatusCode::TOO_MANY_REQUESTS, Some(wait)) => Err(HandlerError::retry_after(wait, error)),
        (StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT, _) => {
            Err(HandlerError::retry(error))
        }
        // What was refused for what it is will be refused again.
        (status, _) if status.is_client_error() => Err(HandlerError::permanent(error)),
        _ => Err(HandlerError::retry(error)),
    }
}

/// How long the receiver asks to be left alone. In seconds, as Slack says it, and not as a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// The webhook's URL, if one is set.
pub(crate) fn webhook_url() -> anyhow::Result<Option<Url>> {
    let Some(set) = std::env::var_os(WEBHOOK_URL) else {
        return Ok(None);
    };
    // The errors do not repeat the value, which is a secret.
    let text = set.to_str().unwrap_or_default();
    let url =
        Url::parse(text).map_err(|error| anyhow::anyhow!("{WEBHOOK_URL} is not a URL: {error}"))?;
    ensure!(
        url.scheme() == "http",
        "{WEBHOOK_URL} begins with `{}:`; this example is built without TLS and needs `http:`",
        url.scheme()
    );
    Ok(Some(url))
}
