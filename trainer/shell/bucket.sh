# `bash trainer/shell/bucket.sh ADDRESS KEPT` ends with 2 and one line unless ADDRESS names a bucket. It runs before there is
# an environment, on machines that cost money: a wrong address would become a folder that goes away with the machine.
# The rules are those of trainer/config/bucket_address.py; tests/config/test_bucket_address.py holds the two equal.
# KEPT: the folder whose files outlive the machine, for file:// addresses; "/" is all of them, "" is none.
LC_ALL=C
address="$1" kept="${2%/}"

refuse() {
  echo "error: BUCKET is '$address': $1" >&2
  exit 2
}

name='[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]'
store='^(s3|gs|r2)://'$name'(/[A-Za-z0-9._=@+:,~-]+)*/?$'
folder='^file://(/[^]/[:cntrl:][:space:]"'\''`\$*?{}<>|[]+)+/?$'

if [[ ! "$address" =~ $store && ! "$address" =~ $folder ]]; then
  refuse "write s3://NAME/PREFIX, gs://NAME/PREFIX, r2://NAME/PREFIX or file:///FOLDER; a variable in it may not be set"
fi
case "/${address#*://}/" in
  */./* | */../*) refuse "write the path without . and .." ;;
esac
if [[ "$address" = file://* ]] && { [ -z "$2" ] || [[ "${address#file://}/" != "$kept"/* ]]; }; then
  refuse "a folder that goes away with this machine: give s3://NAME/PREFIX, gs:// or r2://"
fi
