use outbox_core::OutboxEvents;

#[derive(OutboxEvents)]
enum ShopEvents {}

fn main() {}
