use outbox_core::OutboxEvent;

#[derive(OutboxEvent)]
union OrderPaid {
    order_id: u64,
    cents: i64,
}

fn main() {}
