# What the agent in the demo's sandbox does: ordinary clients, nothing of ours. Steps are announced to the narrator.
step() { printf '\036%s\n' "$1"; }

step env
env | grep -E '^(SHOP_API_KEY|DEPLOY_TOKEN)=' | sort

step pip
if [ -n "$DEMO_PIP" ]; then
    $DEMO_PIP install --quiet --disable-pip-version-check --no-cache-dir --no-deps --index-url "$DEMO_INDEX" \
        --target /tmp/site "$DEMO_PACKAGE" && ls /tmp/site | head -4
else
    curl -sS -o /dev/null -w 'read the index page: status %{http_code}\n' "$DEMO_INDEX$DEMO_PACKAGE/"
fi

step orders
curl -sS -H "X-Api-Key: $SHOP_API_KEY" "https://orders.shop.example:$DEMO_PORT/v1/orders/7"
echo

step refund
curl -sS -X POST -H "X-Api-Key: $SHOP_API_KEY" -H 'Content-Type: application/json' -d '{"order":7}' \
    "https://orders.shop.example:$DEMO_PORT/v1/refunds"
echo

step release
curl -sS -X POST -H "Authorization: Bearer $DEPLOY_TOKEN" -H 'Content-Type: application/json' \
    -d '{"service":"shop","version":"1.4"}' "https://deploy.shop.example:$DEMO_PORT/release"
echo

step direct
curl -sS --noproxy '*' --max-time 5 "http://192.0.2.1/" 2>&1
curl -sS --noproxy '*' --max-time 5 --cacert /run/exeat/bundle.pem -X POST -d '{"order":7}' \
    "https://orders.shop.example:$DEMO_PORT/v1/refunds" 2>&1
echo
exit 0
